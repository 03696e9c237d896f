"""Colours (webcolors), HTTP, MIME types, Unicode and whole numbers (standard library)."""

from __future__ import annotations

import mimetypes
import unicodedata
from http import HTTPStatus

import webcolors

from synthesis.offline.facts.names import canonical, functional, inverse
from synthesis.offline.facts.relations import Relation
from synthesis.offline.facts.tables import relation

_BLOCKS = (range(0x21, 0x7F), range(0xA1, 0x180), range(0x370, 0x530), range(0x531, 0x5F3), range(0x2190, 0x2300))
_CATEGORIES = {
    "Lu": "uppercase letter", "Ll": "lowercase letter", "Lt": "titlecase letter", "Lm": "modifier letter",
    "Lo": "other letter", "Mn": "nonspacing mark", "Mc": "spacing mark", "Nd": "decimal number", "Nl": "letter number",
    "No": "other number", "Pc": "connector punctuation", "Pd": "dash punctuation", "Ps": "open punctuation",
    "Pe": "close punctuation", "Pi": "initial punctuation", "Pf": "final punctuation", "Po": "other punctuation",
    "Sm": "math symbol", "Sc": "currency symbol", "Sk": "modifier symbol", "So": "other symbol",
}  # fmt: skip
_MAX_INTEGER = 500


def build() -> list[Relation]:
    return [*_colors(), *_http(), *_mime(), *_unicode(), *_numbers()]


def _colors() -> list[Relation]:
    value = {name: webcolors.name_to_hex(name) for name in sorted(webcolors.names("css3")) if "grey" not in name}
    value = {name: code for name, code in value.items() if name not in {"aqua", "fuchsia"}}  # cyan and magenta
    opposite = {code: f"#{0xFFFFFF - int(code[1:], 16):06x}" for code in value.values()}
    codes = sorted({*opposite, *opposite.values()})

    def share(name: str, start: int, zh: str) -> Relation:
        return relation(
            f"{name}_of_hex", "colors", ("hex_color", "number"), {c: int(c[start : start + 2], 16) for c in codes},
            (f"the {name} share of", f"the {name} component of"), (f"{zh}色分量",),
            about=(f"Compute the {name} share of a colour, 0 to 255.", f"计算一种颜色的{zh}色分量（0 到 255）。"),
        )  # fmt: skip

    return [
        relation(
            "hex_of_color", "colors", ("color", "hex_color"), value,
            ("the hex code of", "the hex value of"), ("十六进制颜色值",),
            about=("Look up the hex value of a CSS colour name.", "查询 CSS 颜色名称的十六进制值。"),
        ),
        relation(
            "color_of_hex", "colors", ("hex_color", "color"), inverse(value),
            ("the colour name of", "the CSS colour of"), ("颜色名称",),
            about=("Find the CSS colour name of a hex value.", "根据十六进制值查询 CSS 颜色名称。"),
        ),
        relation(
            "complement_of_hex", "colors", ("hex_color", "hex_color"), opposite,
            ("the inverted colour of", "the inverse colour of"), ("反色",),
            about=("Invert a colour.", "计算一种颜色的反色。"),
        ),
        share("red", 1, "红"),
        share("green", 3, "绿"),
        share("blue", 5, "蓝"),
    ]  # fmt: skip


def _http() -> list[Relation]:
    classes = {1: "informational", 2: "success", 3: "redirection", 4: "client error", 5: "server error"}
    phrase = functional((str(status.value), canonical(status.phrase)) for status in HTTPStatus)
    return [
        relation(
            "phrase_of_status", "http", ("status_code", "status_phrase"), phrase,
            ("the reason phrase of", "the HTTP meaning of"), ("原因短语",),
            about=("Look up the reason phrase of an HTTP status code.", "查询 HTTP 状态码的原因短语。"),
        ),
        relation(
            "status_of_phrase", "http", ("status_phrase", "status_code"),
            {text: int(code) for code, text in phrase.items()},
            ("the HTTP status code of", "the status code for"), ("HTTP状态码",),
            about=("Look up the HTTP status code of a reason phrase.", "根据原因短语查询 HTTP 状态码。"),
        ),
        relation(
            "status_class_of_status", "http", ("status_code", "text"),
            {str(s.value): classes[s // 100] for s in HTTPStatus},
            ("the HTTP status class of", "the status category of"), ("状态类别",),
            about=("Look up the class of an HTTP status code.", "查询 HTTP 状态码的类别。"),
        ),
        relation(
            "constant_of_status", "http", ("status_code", "text"), {str(s.value): s.name for s in HTTPStatus},
            ("the HTTP constant name of", "the constant name of"), ("状态常量名",),
            about=("Look up the constant name of an HTTP status code.", "查询 HTTP 状态码的常量名。"),
        ),
    ]  # fmt: skip


def _mime() -> list[Relation]:
    types = mimetypes.MimeTypes(filenames=())  # the built-in table only, not the operating system's
    known = {ext: kind for table in types.types_map for ext, kind in table.items()}
    mime = functional((canonical(ext[1:]), canonical(known[ext])) for ext in sorted(known))
    extension = functional(
        (kind, (types.guess_extension(kind) or "")[1:] or None) for kind in sorted(set(mime.values()))
    )
    family = {kind: kind.partition("/")[0] for kind in extension}
    return [
        relation(
            "mime_type_of_extension", "mime", ("file_extension", "mime_type"), mime,
            ("the MIME type of", "the media type of"), ("MIME类型",),
            about=("Look up the MIME type of a file extension.", "查询文件扩展名的 MIME 类型。"),
        ),
        relation(
            "extension_of_mime_type", "mime", ("mime_type", "file_extension"), extension,
            ("the file extension of", "the usual extension of"), ("文件扩展名",),
            about=("Look up the usual file extension of a MIME type.", "查询 MIME 类型常用的文件扩展名。"),
        ),
        relation(
            "family_of_mime_type", "mime", ("mime_type", "text"), family,
            ("the media family of", "the top-level type of"), ("媒体大类",),
            about=("Look up the family of a MIME type, such as image.", "查询 MIME 类型的大类，例如 image。"),
        ),
        relation(
            "extension_count_of_mime_type", "mime", ("mime_type", "number"),
            {kind: len(types.guess_all_extensions(kind)) for kind in extension},
            ("the extension count of", "the number of extensions of"), ("扩展名数量",),
            about=("Count the known file extensions of a MIME type.", "查询 MIME 类型已知的扩展名数量。"),
        ),
    ]  # fmt: skip


def _code_point(character: str) -> str:
    return f"U+{ord(character):04X}"


def _unicode() -> list[Relation]:
    named = ((canonical(unicodedata.name(chr(n), "").lower()), chr(n)) for block in _BLOCKS for n in block)
    characters = functional(named)
    points = {_code_point(c): c for c in characters.values()}
    upper = {p: _code_point(c.upper()) for p, c in points.items() if len(c.upper()) == 1 and c.upper() != c}
    return [
        relation(
            "code_point_of_character", "unicode", ("character", "code_point"),
            {name: _code_point(c) for name, c in characters.items()},
            ("the code point of", "the Unicode code point of"), ("码位",),
            about=("Look up the code point of a Unicode character name.", "根据 Unicode 字符名称查询码位。"),
        ),
        relation(
            "character_of_code_point", "unicode", ("code_point", "character"),
            {_code_point(c): name for name, c in characters.items()},
            ("the character name of", "the Unicode name of"), ("字符名称",),
            about=("Look up the name of a Unicode code point.", "查询 Unicode 码位的字符名称。"),
        ),
        relation(
            "category_of_code_point", "unicode", ("code_point", "text"),
            {p: category for p, c in points.items() if (category := _CATEGORIES.get(unicodedata.category(c)))},
            ("the character category of", "the Unicode category of"), ("字符类别",),
            about=("Look up the general category of a code point.", "查询码位的通用类别。"),
        ),
        relation(
            "utf_bytes_of_code_point", "unicode", ("code_point", "text"),
            {p: c.encode().hex(" ").upper() for p, c in points.items()},
            ("the UTF-8 bytes of", "the UTF-8 encoding of"), ("UTF-8字节",),
            about=("Encode a code point as UTF-8 bytes in hex.", "把码位编码为十六进制 UTF-8 字节。"),
        ),
        relation(
            "uppercase_of_code_point", "unicode", ("code_point", "code_point"),
            {p: u for p, u in upper.items() if u in points},
            ("the uppercase code point of", "the capital letter of"), ("大写码位",),
            about=("Look up the uppercase form of a code point.", "查询码位的大写形式。"),
        ),
    ]  # fmt: skip


def _roman(n: int) -> str:
    text = ""
    for value, letters in (
        (100, "C"), (90, "XC"), (50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"),
    ):  # fmt: skip
        if value == 100 and n >= 400:
            letters, value = ("D", 500) if n >= 500 else ("CD", 400)
            text, n = text + letters, n - value
            value, letters = 100, "C"
        text, n = text + letters * (n // value), n % value
    return text


def _numbers() -> list[Relation]:
    every = range(1, _MAX_INTEGER + 1)
    sieve = [n for n in range(2, _MAX_INTEGER + 100) if all(n % d for d in range(2, int(n**0.5) + 1))]
    roman = {str(n): _roman(n) for n in every}
    binary = {str(n): f"{n:b}" for n in every if n > 3}
    return [
        relation(
            "roman_numeral_of_number", "numbers", ("integer", "roman"), roman,
            ("the Roman numeral of", "the Roman form of"), ("罗马数字",),
            about=("Write a number as a Roman numeral.", "把一个数写成罗马数字。"),
        ),
        relation(
            "number_of_roman_numeral", "numbers", ("roman", "integer"), {text: int(n) for n, text in roman.items()},
            ("the number written in Roman as", "the value of Roman numeral"), ("对应整数",),
            about=("Read a Roman numeral.", "读出一个罗马数字的值。"),
        ),
        relation(
            "binary_form_of_number", "numbers", ("integer", "binary"), binary,
            ("the binary form of", "the binary digits of"), ("二进制形式",),
            about=("Write a number in binary.", "把一个数写成二进制。"),
        ),
        relation(
            "next_prime_of_number", "numbers", ("integer", "integer"),
            {str(n): min(p for p in sieve if p > n) for n in every},
            ("the next prime after", "the first prime above"), ("下一个素数",),
            about=("Find the smallest prime above a number.", "查询大于一个数的最小素数。"),
        ),
        relation(
            "divisor_count_of_number", "numbers", ("integer", "integer"),
            {str(n): sum(n % d == 0 for d in range(1, n + 1)) for n in every},
            ("the divisor count of", "the number of divisors of"), ("约数个数",),
            about=("Count the divisors of a number.", "查询一个数有多少个约数。"),
        ),
        relation(
            "top_prime_factor_of_number", "numbers", ("integer", "integer"),
            {str(n): max(p for p in sieve if n % p == 0) for n in every if n > 1},
            ("the largest prime factor of", "the greatest prime factor of"), ("最大质因数",),
            about=("Find the largest prime factor of a number.", "查询一个数的最大质因数。"),
        ),
    ]  # fmt: skip
