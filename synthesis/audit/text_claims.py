"""Plain readings of texts: numbers, names, scripts and similarity. No model, and no checker of the pipelines."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from synthesis.core.normal_text import normalized

_NUMBER: Final = re.compile(r"\d+(?:[.,'’ \u00a0\u202f]\d{3})+(?:[.,]\d+)?(?!\d)|\d+(?:[.,]\d+)?")
_WORD: Final = re.compile(r"[^\W_\u2e80-\u9fff]+(?:['’][^\W_\u2e80-\u9fff]+)*|[\u2e80-\u9fff]+")
_LABEL: Final = re.compile(
    r"^[ \t>*#-]*(?:\d{1,3}[.)][ \t])?[*_]{0,2}[^\n:.]{1,40}:[*_]{0,2}|^#{1,6}[^\n]*|^[ \t]*\d{1,3}[.)][ \t]", re.M
)
"""Labels, headings and the numbers of lists: an author's, no claims."""
_CAPITAL: Final = r"[A-ZÀ-ÖØ-ÞΑ-ΩА-Я][A-Za-zÀ-ɏΑ-ώА-я0-9_'’/-]*"
_CAPITALISED: Final = re.compile(
    rf"(?<![A-Za-zÀ-ɏΑ-ώА-я0-9_]){_CAPITAL}(?:[ \u00a0](?:(?:of|the|and|de|da|la|le|von|van) )?{_CAPITAL})*"
)
_SENTENCE_START: Final = re.compile(r"(?:^|[.!?:;\n\"“”*•(]|[-–—] )\s*$")
_ORDINARY: Final = frozenset(
    re.findall(
        r"\w+",
        "i ok am pm utc gmt id api url json html http https celsius fahrenheit yes no usd eur gbp cny jpy english "
        "chinese monday tuesday wednesday thursday friday saturday sunday mon tue wed thu fri sat sun january february "
        "march april may june july august september october november december jan feb mar apr jun jul aug sep sept oct "
        "nov dec the a an of and de da la le von van",
    )
)
"""Capitalised words that name nothing that a tool would have to return."""
_WORDS_OF_NUMBERS: Final = {
    word: float(number)
    for number, words in enumerate(
        (
            *("zero no 零 〇", "one a once first 一", "two twice second 二 两", "three third 三", "four fourth 四"),
            *("five fifth 五", "six sixth 六", "seven seventh 七", "eight eighth 八", "nine ninth 九", "ten tenth 十"),
            *("eleven", "twelve"),
        )
    )
    for word in words.split()
}
_MARKS: Final = re.compile(r"[_/\\@.`=#]")
"""Characters of addresses, paths and codes."""
_LARGEST: Final = 1e300
_SCALES: Final = (1.0, 1e2, 1e3, 1e4, 1e6, 1e8, 1e9)
_SCRIPTS: Final = {
    "zh": "CJK", "ja": "CJK HIRAGANA KATAKANA", "ko": "HANGUL", "ar": "ARABIC", "fa": "ARABIC", "ur": "ARABIC",
    "ps": "ARABIC", "he": "HEBREW", "el": "GREEK", "th": "THAI", "hi": "DEVANAGARI", "mr": "DEVANAGARI",
    "ne": "DEVANAGARI", "ka": "GEORGIAN", "hy": "ARMENIAN", "bn": "BENGALI", "ta": "TAMIL", "te": "TELUGU",
    "kn": "KANNADA", "ml": "MALAYALAM", "gu": "GUJARATI", "pa": "GURMUKHI", "si": "SINHALA", "my": "MYANMAR",
    "km": "KHMER", "lo": "LAO", "ru": "CYRILLIC", "uk": "CYRILLIC", "bg": "CYRILLIC", "be": "CYRILLIC",
    "mk": "CYRILLIC", "kk": "CYRILLIC", "ky": "CYRILLIC", "mn": "CYRILLIC", "sr": "CYRILLIC LATIN",
    "uz": "CYRILLIC LATIN", "az": "CYRILLIC LATIN", "bs": "CYRILLIC LATIN",
}  # fmt: skip
"""Language → first words of the Unicode names of its letters; Latin for all others."""
_COMMON: Final = {
    "de": "der die das und ist nicht ein eine ich sie für mit wie den dem von zu auf",
    "en": "the of and is are what which for to in a please find me you how with my",
    "es": "el la los las de que es una un por para cuál qué con está del",
    "fr": "le la les des est une un pour que quel quelle dans avec vous et du",
    "it": "il la le di che è una un per quale con sono gli del nel",
    "nl": "de het een van en is niet voor met wat welke op zijn ik",
    "pt": "o a os as de que é uma um para qual com não do da em",
}
"""Language → frequent words, for languages that share Latin letters."""


_WRITES: Final = re.compile(
    r"(?:^|_)(?:add|append|assign|book|buy|cancel|clear|close|commit|create|delete|deposit|edit|enable|disable|insert|lock"
    r"|mark|merge|modify|move|open|order|pay|post|put|register|remove|rename|reset|save|schedule|send|set|start|stop"
    r"|submit|toggle|transfer|turn|unlock|update|upload|withdraw|write)(?:_|[A-Z]|$)|(?:Add|Create|Delete|Set|Update)(?=[A-Z])"
)

_CHANGES_BY_ITSELF: Final = re.compile(
    r"current|now\b|today|latest|random|shuffle|generate|live\b|real[- ]?time|status|当前|现在|今天|最新|随机|实时",
    re.IGNORECASE,
)


def normal(text: str) -> str:
    """Return a text without case, accents, typographic variants and repeated white space."""
    folded = normalized("NFKD", text.casefold())
    plain = "".join(one for one in folded if not unicodedata.combining(one))
    return " ".join(plain.replace("’", "'").replace("–", "-").replace("−", "-").split())


def words(text: str) -> list[str]:
    """Return the words of a text in normal form."""
    return _WORD.findall(normal(text))


def number_readings(token: str) -> set[float]:
    """Return the values that a written number may have: `1,234` is 1234 or 1.234."""
    compact = re.sub(r"['’ \u00a0\u202f]", "", token)
    forms = {compact.replace(",", ""), compact.replace(".", "").replace(",", ".")}
    readings = set()
    for form in forms:
        try:
            readings.add(float(form))
        except ValueError:
            continue
    return readings


def numbers(text: str) -> Iterator[tuple[str, set[float]]]:
    """Yield each number of a text as it is written, and its readings."""
    for match in _NUMBER.finditer(normalized("NFKC", text)):
        yield match[0], number_readings(match[0])


def held_numbers(text: str) -> set[float]:
    """Return all values that numbers and number words of a text may have."""
    found = {value for _, readings in numbers(text) for value in readings}
    found.update(float(run) for run in re.findall(r"\d{1,18}", text))  # spaces may also separate two numbers
    found.update(_WORDS_OF_NUMBERS[word] for word in words(text) if word in _WORDS_OF_NUMBERS)
    found.update(_WORDS_OF_NUMBERS[sign] for sign in set(text) if sign in _WORDS_OF_NUMBERS and not sign.isascii())
    return found


def is_held(token: str, held: Iterable[float]) -> bool:
    """Return whether a written number is one of some values, rounded to its decimals, scaled (%, thousand, million,
    万, 亿) or on a twelve-hour clock."""
    decimals = len(token.rpartition(".")[2]) if "." in token else 0
    half = 0.5 * 10**-decimals
    readings = number_readings(token)
    for value in held:
        for reading in readings:
            if abs(reading - value) <= 1e-9 * max(1.0, abs(value)) or value - reading == 12 <= value <= 24:
                return True
            for scale in _SCALES:
                if abs(reading - value / scale) <= half * 1.0001 and (scale == 1 or value / scale >= 1 or decimals):
                    return True
                if scale <= 100 and abs(reading - value * scale) <= half * 1.0001:
                    return True
    return False


def derived_numbers(outputs: Sequence[Any]) -> set[float]:
    """Return numbers that follow from results in one step: lengths of lists, sums, means, and for up to twelve
    different numbers sums, differences, products and quotients of two.

    Args:
        outputs: results as JSON values, or texts that are not JSON.
    """
    found: set[float] = {float(len(outputs))}
    leaves: list[float] = []
    for output in outputs:
        own = []
        for part in _parts(output):
            if isinstance(part, (list, dict)):
                found.add(float(len(part)))
            elif isinstance(part, bool):
                continue
            elif isinstance(part, (int, float)) and abs(part) < _LARGEST:
                own.append(float(part))
            elif isinstance(part, str):
                own += [min(readings) for _, readings in numbers(part)][:20]
        leaves += own
    if leaves:
        found |= {sum(leaves), sum(leaves) / len(leaves), float(len(leaves))}
    distinct = sorted(set(leaves))
    if len(distinct) <= 12:
        for one in distinct:
            for other in distinct:
                found |= {one + other, abs(one - other), one * other}
                if other:
                    found.add(one / other)
    return found


def _parts(value: Any) -> Iterator[Any]:
    """Yield a JSON value and all values in it, in their order."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        yield one
        inner = one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        waiting += reversed(list(inner))


def leaves(value: Any) -> list[Any]:
    """Return the texts, numbers and truth values of a JSON value."""
    return [part for part in _parts(value) if not isinstance(part, (dict, list)) and part is not None]


def parsed(text: str) -> Any:
    """Return a result as a JSON value, or its text if it is not JSON."""
    try:
        return msgspec.json.decode(text.encode("utf-8", "replace"))
    except (msgspec.DecodeError, RecursionError):
        return text


def claims(text: str) -> str:
    """Return a text without code, links, labels, headings and list numbers, which claim nothing."""
    without = re.sub(r"```.*?(?:```|\Z)|https?://\S+", " ", text, flags=re.S)
    return _LABEL.sub(" ", without)


def names(text: str) -> Iterator[str]:
    """Yield capitalised names that do not open a sentence, and codes of capitals and digits."""
    for match in _CAPITALISED.finditer(text):
        name = match[0].rstrip("'’-")
        opens = _SENTENCE_START.search(text[max(0, match.start() - 4) : match.start()]) or match.start() == 0
        if opens:
            name = name.partition(" ")[2].strip()
        parts = [part for part in name.split() if part[:1].isupper() and normal(part) not in _ORDINARY]
        if parts and any(part.isascii() or unicodedata.name(part[0], "").startswith("LATIN") for part in parts):
            yield " ".join(name.split())


def is_named(name: str, held: str, held_words: set[str]) -> bool:
    """Return whether a name, or each of its words, occurs in a held text.

    Args:
        held: the text in normal form.
        held_words: its words.
    """
    if normal(name) in held:
        return True
    own = [word.removesuffix("'s") for word in words(name)]
    return all(word in held_words or word in _ORDINARY or word.rstrip("s") in held_words for word in own)


def letters_of(text: str, language: str) -> tuple[int, int]:
    """Return the numbers of letters of the language's script, and of all letters."""
    wanted = tuple(_SCRIPTS.get(language, "LATIN").split())
    own = every = 0
    for sign in text[:4000]:
        if sign.isalpha():
            every += 1
            own += (
                sign.isascii()
                if wanted == ("LATIN",) and sign.isascii()
                else (unicodedata.name(sign, "").startswith(wanted))
            )
    return own, every


def is_other_language(text: str, language: str) -> bool:
    """Return whether a text is surely not of a language: too few letters of its script, or frequent words of another.

    Names may be in Latin letters anywhere, so one letter of another script is enough for its languages.
    """
    own, every = letters_of(text, language)
    if every < 8:
        return False
    if _SCRIPTS.get(language, "LATIN") != "LATIN":
        return own == 0
    if own < 0.5 * every:
        return True
    found = set(words(text))
    counts = {one: len(found & set(normal(common).split())) for one, common in _COMMON.items()}
    best = max(counts, key=lambda one: counts[one])
    return language in counts and counts[best] >= 4 and counts[best] >= counts[language] + 3


def foreign_words(text: str, language: str) -> list[str]:
    """Return lower-case Latin words in a text of another script. Names and codes have capitals or digits."""
    if not has_script_of_its_own(language):
        return []
    # Each run of such characters is read once: a pattern that asks for a mark in it would backtrack.
    cleaned = re.sub(r"[A-Za-z0-9_/\\@.`=#:-]+", lambda run: " " if _MARKS.search(run[0]) else run[0], text)
    return re.findall(r"(?<![A-Za-z0-9-])[a-z]{3,}(?![A-Za-z0-9-])", cleaned)


def has_script_of_its_own(language: str) -> bool:
    """Return whether a language is not written in Latin letters."""
    return "LATIN" not in _SCRIPTS.get(language, "LATIN")


def shingles(text: str) -> frozenset[str]:
    """Return the runs of three words of a text; of three characters for scripts without spaces."""
    plain = normal(text)
    if any(unicodedata.name(sign, "").startswith(("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO")) for sign in plain):
        units: Sequence[str] = plain.replace(" ", "")
    else:
        units = words(text)
    size = min(3, max(1, len(units)))
    return frozenset(" ".join(units[start : start + size]) for start in range(len(units) - size + 1))


def near_pairs(texts: Sequence[str], threshold: float = 0.5) -> Iterator[tuple[int, int, float]]:
    """Yield for each text its most similar earlier one with a Jaccard similarity of `threshold` or more.

    The search is exact: two such sets share one of the rarest shingles of each (prefix filtering, Chaudhuri et al.
    2006).
    """
    sets = [shingles(text) for text in texts]
    frequency: dict[str, int] = {}
    for one in sets:
        for shingle in one:
            frequency[shingle] = frequency.get(shingle, 0) + 1
    index: dict[str, list[int]] = {}
    for number, one in enumerate(sets):
        ordered = sorted(one, key=lambda shingle: (frequency[shingle], shingle))
        prefix = ordered[: len(ordered) - _least_shared(len(ordered), threshold) + 1]
        best, similarity = -1, 0.0
        for other in {earlier for shingle in prefix for earlier in index.get(shingle, ())}:
            shared = len(one & sets[other])
            union = len(one) + len(sets[other]) - shared
            if union and (found := shared / union) >= threshold and (found, -other) > (similarity, -best):
                best, similarity = other, found
        for shingle in prefix:
            index.setdefault(shingle, []).append(number)
        if best >= 0:
            yield number, best, similarity


def _least_shared(size: int, threshold: float) -> int:
    """Return how many shingles another set must share at least with one of `size`."""
    return max(1, -int(-size * threshold // 1))


def canonical(arguments: Mapping[str, Any]) -> str:
    """Return arguments as one text: equal arguments give equal texts."""
    return msgspec.json.encode(_plain(arguments), order="sorted").decode()


def _plain(value: Any) -> Any:
    """Return a JSON value in which 3.0 is 3, and integers of more than 64 bits are texts."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, int) and abs(value) >= 1 << 63:
        return str(value) if value.bit_length() < 10_000 else "a large number"
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else value


def is_write(name: str) -> bool:
    """Return whether the name of a tool says that it changes something."""
    return _WRITES.search(name) is not None


def changes_by_itself(document: str) -> bool:
    """Return whether a tool's name or description says that its results change without a call, as the time does."""
    return _CHANGES_BY_ITSELF.search(document) is not None


@functools.lru_cache(maxsize=1_024)
def _reading(text: str) -> tuple[str, frozenset[str], frozenset[float]]:
    return normal(text), frozenset(words(text)), frozenset(held_numbers(text))


class HeldText:
    """Text that an agent has seen: grows with the conversation."""

    def __init__(self, *given: str) -> None:
        self.text, self.words, self.numbers = "", set[str](), set[float]()
        for text in given:
            self.add(text)

    def add(self, text: str) -> None:
        """Add a text."""
        plain, own, values = _reading(text)
        self.text += f" {plain}"
        self.words |= own
        self.numbers |= values

    def has_value(self, value: Any) -> bool:
        """Return whether a value of an argument could be known from the text."""
        if isinstance(value, bool) or value in ("", None):
            return True
        if isinstance(value, (int, float)) and abs(value) < _LARGEST:
            return is_held(f"{value:.10g}".lstrip("-"), self.numbers)
        plain = normal(str(value))
        if plain in self.text or plain.replace(" ", "") in self.text.replace(" ", ""):
            return True
        own = words(str(value))
        known = [word for word in own if self._has_word(word)]
        # A phrase of the agent's own, such as a search text, may add a few words.
        return not own or len(known) == len(own) or (len(own) >= 4 and len(known) >= 0.5 * len(own))

    def _has_word(self, word: str) -> bool:
        if word in self.words or word.rstrip("s") in self.words or f"{word}s" in self.words:
            return True
        if any(sign.isdigit() for sign in word):
            digits = re.sub(r"\D", "", word)
            return digits in self.text or (digits != "" and float(digits) in self.numbers)
        # A code of a name: its letters in order, the first one first.
        return len(word) <= 4 and any(
            other[0] == word[0] and len(other) > len(word) and _is_subsequence(word, other) for other in self.words
        )


def _is_subsequence(short: str, long: str) -> bool:
    rest = iter(long)
    return all(sign in rest for sign in short)
