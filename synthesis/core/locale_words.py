"""Language data for `locales` beyond the Unicode CLDR: yes and no, sentences, word forms, the clock.

A language is read once it has an entry in `WORDS`. All patterns are matched without heed of case, against text that
`Locale.plain` made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from synthesis.core.particles import (
    FINNISH_CASES,
    JAPANESE_PARTICLES,
    KOREAN_PARTICLES,
    RUSSIAN_CASES,
    THAI_AFTER,
    THAI_BEFORE,
    TURKISH_CASES,
)

Half = Literal["am", "pm", "night", "evening"]
"""Part of the day. `night` is before midnight from six o'clock on, `evening` counts hours from six p.m. (Thai)."""


@dataclass(frozen=True)
class Clock:
    """Notation of the time of day in a language.

    Attributes:
        hour: pattern of the mark behind the hour.
        minutes: pattern of the minutes behind that mark; its group `m2` is the number, or the word for half an hour.
        lasts: whether the mark also says how long something takes (14h30, 2 часа 30 минут).
        at: pattern that ends where the time starts and says that it is one.
        before: patterns that end where the time starts, by the half of the day that they say.
        after: the same behind the time.
    """

    hour: str = r"(?!)"
    minutes: str = r"(?P<m2>(?!))"
    lasts: bool = False
    at: str = r"(?!)"
    before: dict[Half, str] = field(default_factory=dict)
    after: dict[Half, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Words:
    """The words of one language.

    Attributes:
        yes: what says true when it is all of a sentence, or all before a comma; separated by "|".
        no: the same for false.
        regret: pattern of what politeness puts before a judgement: "unfortunately".
        judged: pattern of what is said to be true or false, before a word of `yes` or `no`: "das ist leider".
        polite: pattern of what politeness adds behind such a word.
        sentence: pattern found in a sentence and not in a name or value.
        fewest: words that a sentence has at least.
        joins: pattern of "and" between two elements of a list.
        before: pattern of all letters that may stand before a name in its word (Arabic clitics, French elision).
        after: pattern of all letters that may stand behind a name in its word (particles, case endings).
        beside: whether words touch: then `before` and `after` match next to the name, not up to the end of a word.
        links: pattern of the words between day, month and year, and between a number and its unit.
        minus: pattern of the words for a minus sign before a number.
        below: pattern of what says "below zero" behind a number and its unit.
        ordinals: pattern of ranks, days of a month and the like, which are no numbers; it starts with what they have
            before the number, if anything, and its group `n` is the number.
        touches: whether words of the language touch digits.
        tonal: whether words that differ in accents alone are different words: Du and Dữ.
        clock: its times of the day.
        months: more names of months, by number.
        units: more spellings of units.
        multipliers: more spellings of multipliers.
        regions: CLDR locales whose names of months count too.
        signs: characters and what they are replaced with before anything is read.
    """

    yes: str
    no: str
    sentence: str
    joins: str
    regret: str = r"(?!)"
    judged: str = r"(?!)"
    polite: str = r"(?!)"
    fewest: int = 2
    before: str = ""
    after: str = ""
    beside: bool = False
    links: str = r"(?!)"
    minus: str = r"(?!)"
    below: str = r"(?!)"
    ordinals: str = r"(?P<n>(?!))"
    touches: bool = False
    tonal: bool = False
    clock: Clock = Clock()
    months: dict[int, str] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    multipliers: dict[str, int] = field(default_factory=dict)
    regions: tuple[str, ...] = ()
    signs: dict[str, str] = field(default_factory=dict)


def _and(words: str) -> str:
    return rf",?\s(?:{words})\s"


WORDS: Final[dict[str, Words]] = {
    "de": Words(
        yes="ja|jawohl|richtig|korrekt|wahr|das stimmt|stimmt|das ist richtig|das ist korrekt|das ist wahr|genau|"
        "ja das stimmt|die aussage ist wahr|die aussage ist richtig|die antwort ist ja|die antwort lautet ja",
        no="nein|falsch|unwahr|das stimmt nicht|stimmt nicht|das ist falsch|das ist nicht richtig|nicht richtig|"
        "das ist nicht wahr|nein das stimmt nicht|die aussage ist falsch|die antwort ist nein|"
        "die antwort lautet nein|nicht korrekt|inkorrekt|nicht wahr|nicht zutreffend|trifft nicht zu",
        regret=r"leider|tut mir leid",
        judged=r"(?:ist )?(?:das|dies|es|(?:die|diese) (?:aussage|behauptung|antwort|angabe|information))"
        r"(?: ist| wäre)?(?: leider| so| völlig| vollkommen| absolut| ganz| tatsächlich)*",
        sentence=r"\b(?:ist|sind|war|waren|wird|wurde|hat|haben|heißt|lautet|liegt|liegen|beträgt|kostet|befindet|"
        r"findet|fährt|beginnt|geboren|schrieb|gehören|gehört|gibt|dauert|kommt|kommen|stammt|spricht|lebt|leben|es|er|sie)\b",
        minus=r"\bminus",
        below=r"unter (?:Null|dem Gefrierpunkt)",
        joins=_and("und|sowie|& "),
        after="e?s|'s?|n|en",
        links=r"(?:der|den|im)",
        ordinals=r"\b(?:der|die|das|dem|den|des|am|im|zum|vom|beim|zur)\s(?P<n>\d{1,3})\.(?=\s\w)",
        clock=Clock(
            hour=r"\s?Uhr\b", minutes=r"\s(?P<m2>\d\d)(?!\d|[.,]\d)", at=r"\b(?:um|ab|gegen|bis)",
            after={"am": r"\s(?:morgens|vormittags|früh|am Morgen|am Vormittag)\b", "pm": r"\s(?:nachmittags|mittags|"
                   r"am Nachmittag|abends|am Abend)\b", "night": r"\s(?:nachts|in der Nacht)\b"},
        ),
        units={"dollar": "usd", "pfund": "gbp", "yen": "jpy", "rubel": "rub", "franken": "chf", "std": "h",
               "tage": "day", "tagen": "day", "jahren": "year", "monaten": "month", "stundenkilometer": "km/h",
               "km pro stunde": "km/h", "km in der stunde": "km/h", "grad": "degrees", "tonnen": "t"},
        multipliers={"tsd": 10**3, "tsd.": 10**3, "mill.": 10**6},
        regions=("de_AT",),
    ),
    "fr": Words(
        yes="oui|si|vrai|exact|correct|c'est vrai|c'est exact|c'est correct|tout à fait|en effet|bien sûr|"
        "effectivement|l'affirmation est vraie|la réponse est oui",
        no="non|faux|inexact|incorrect|c'est faux|c'est inexact|ce n'est pas vrai|ce n'est pas le cas|pas du tout|"
        "l'affirmation est fausse|la réponse est non|pas correct|pas vrai|pas exact|pas le cas|pas correcte|pas exacte|"
        "pas vraie|fausse|incorrecte|inexacte",
        regret=r"malheureusement|désolée?",
        judged=r"(?:c'est|ce n'est|cela (?:n')?est|(?:cette |l')(?:affirmation|information|réponse) (?:n')?est)"
        r"(?: malheureusement| tout à fait| absolument| complètement)*",
        sentence=r"\b(?:est|sont|était|étaient|a|ont|se|s'appelle|coûte|mesure|compte|dure|fut|il|elle|ce|ils|elles|"
        r"parle|vit|né|née|part|commence|située?s?)\b|\bc'",
        minus=r"(?<!\bau )\bmoins",
        below=r"(?:au-dessous de|sous|en dessous de) zéro",
        joins=_and("et|ainsi que"),
        before=r"(?:l|d|qu|n|s|j|c|m|t|jusqu|lorsqu|puisqu|presqu)'",
        links=r"(?:de|d'|du|des|de l'année)",
        ordinals=r"\b(?P<n>\d{1,4})(?:er|re|ère|e|ème|nd|nde)(?![\w])",
        clock=Clock(
            hour=r"\s?h(?:eures?)?(?![^\W\d])", minutes=r"\s?(?P<m2>\d\d)(?:\s?min(?:utes)?)?(?![\w])", lasts=True,
            at=r"(?:\bà|\bvers|\bdès|\bil est|\bjusqu'à)",
            after={"am": r"\sdu matin\b", "pm": r"\s(?:du soir|de l'après-midi)\b"},
        ),
        units={"dollars": "usd", "dollar": "usd", "livres": "gbp", "livres sterling": "gbp", "yens": "jpy",
               "roubles": "rub", "pour cent": "%", "degrés": "degrees", "degré": "degrees", "ans": "year", "an": "year",
               "jours": "day", "kilomètres-heure": "km/h", "kilomètres heure": "km/h",
               "kilomètres à l'heure": "km/h", "km à l'heure": "km/h"},
        multipliers={"milliers": 10**3, "mille": 10**3},
    ),
    "es": Words(
        yes="sí|si|verdadero|cierto|correcto|es cierto|es verdad|es correcto|así es|claro|en efecto|efectivamente|"
        "exacto|por supuesto|la afirmación es verdadera|la respuesta es sí",
        no="falso|incorrecto|es falso|es incorrecto|no es cierto|no es verdad|no es correcto|para nada|"
        "no es así|la afirmación es falsa|la respuesta es no|no es correcta|no es cierta|no es exacto|"
        "es falsa|es incorrecta",
        regret=r"lamentablemente|desafortunadamente|lo siento",
        judged=r"(?:eso|esto|(?:la|esa|esta) (?:afirmación|respuesta|información))",
        sentence=r"\b(?:es|son|era|eran|fue|está|están|tiene|tienen|hay|se|cuesta|mide|dura|vive|nació|habla|sale|"
        r"empieza|ubica|asciende|alcanza|llama)\b",
        minus=r"(?<!\bal )(?<!\blo )\bmenos",
        below=r"bajo cero",
        joins=_and("y|e|así como"),
        links=r"(?:de|del|de l año|del año)",
        ordinals=r"\b(?P<n>\d{1,3})\.?(?:[°ª]|er|ro|ra|do|da|to|ta)(?=\s[a-zà-ÿ]{3,}|[.,]?$)(?!\sceln?s|\scent)",
        clock=Clock(
            hour=r"(?:\s?h(?:oras|rs|s)?(?![^\W\d])\.?|(?<=\blas \d\d)(?=[.,;)!?](?!\d)|\s*$))",
            minutes=r"\s?(?P<m2>\d\d)(?:\s?min(?:utos)?)?(?![\w])",
                lasts=True,
            at=r"(?:\ba las?|\bson las|\bdesde las?|\bhasta las?|\bes la|\bsobre las)",
            after={"am": r"\s(?:de la mañana|de la madrugada|a\.?\s?m\.?(?!\w))",
                "pm": r"\s(?:de la tarde|p\.?\s?m\.?(?!\w))", "night": r"\sde la noche\b"},
        ),
        units={"dólares": "usd", "dólar": "usd", "libras": "gbp", "yenes": "jpy", "rublos": "rub", "pesos": "mxn",
               "por ciento": "%", "grados": "degrees", "grado": "degrees", "kilómetros cuadrados": "km2",
               "km por hora": "km/h"},
        multipliers={"miles": 10**3},
        months={9: "setiembre"},
    ),
    "pt": Words(
        yes="sim|verdadeiro|verdade|certo|correto|correcto|é verdade|é correto|está correto|isso mesmo|exato|com "
        "certeza|claro|a afirmação é verdadeira|a resposta é sim",
        no="não|falso|errado|incorreto|incorrecto|é falso|não é verdade|não é correto|de jeito nenhum|"
        "a afirmação é falsa|a resposta é não|não está correto|não está correta|não é correta|não é verdadeira|é falsa|"
        "está errado|está errada|está incorreto|está incorreta",
        regret=r"infelizmente",
        judged=r"(?:isso|isto|(?:a|essa|esta) (?:afirmação|resposta|informação))",
        sentence=r"\b(?:é|são|era|eram|foi|está|estão|fica|tem|têm|há|custa|mede|dura|vive|nasceu|fala|sai|começa|se|"
        r"localiza|chega|chama)\b",
        minus=r"(?<!pelo )(?<!\bao )\bmenos",
        below=r"abaixo de zero",
        joins=_and("e|bem como"),
        links=r"(?:de|do|do ano de|da)",
        ordinals=r"\b(?P<n>\d{1,3})\.?[°ªºao](?=\s[a-zà-ÿ]{3,}|[.,]?$)(?!\scel|\scent)",
        clock=Clock(
            hour=r"(?:\s?h(?:oras|rs|s)?(?![^\W\d])|(?<=\bàs \d\d)(?=[.,;)!?](?!\d)|\s*$))",
            minutes=r"\s?(?:e\s)?(?P<m2>\d\d)(?:\s?min(?:utos)?)?(?![\w])",
                lasts=True,
            at=r"(?:\bàs?|\bsão|\bdas|\baté as|\bdesde as|\bpelas)",
            after={"am": r"\s(?:da manhã|da madrugada)\b", "pm": r"\s(?:da tarde)\b", "night": r"\sda noite\b"},
        ),
        units={"dólares": "usd", "dólar": "usd", "libras": "gbp", "ienes": "jpy", "reais": "brl", "real": "brl",
               "rublos": "rub", "por cento": "%", "graus": "degrees", "grau": "degrees", "km por hora": "km/h"},
        multipliers={"biliões": 10**12, "bilião": 10**12, "mil milhões": 10**9},
    ),
    "it": Words(
        yes="sì|si|vero|giusto|esatto|corretto|è vero|è corretto|è esatto|certo|certamente|esattamente|"
        "l'affermazione è vera|la risposta è sì",
        no="falso|sbagliato|errato|è falso|non è vero|non è corretto|non è così|affatto|"
        "l'affermazione è falsa|la risposta è no|non è corretta|non è vera|non è esatto|è falsa|"
        "è errato|è errata|è sbagliato",
        regret=r"purtroppo|mi dispiace",
        judged=r"(?:questo|ciò|quello|(?:l'|la |questa |quest')(?:affermazione|risposta|informazione))",
        sentence=r"\b(?:è|sono|era|erano|fu|sta|stanno|ha|hanno|c'è|ci|si|costa|misura|dura|vive|nacque|nato|nata|"
        r"parla|parte|inizia|conta|trova|chiama)\b",
        minus=r"\bmeno",
        below=r"sotto (?:lo )?zero",
        joins=_and("e|ed|nonché"),
        before=r"(?:l|d|un|dell|all|nell|sull|dall|quell|c|s)'",
        links=r"(?:di|d'|del|dell'anno)",
        ordinals=r"\b(?P<n>\d{1,3})\.?[°ªºao](?=\s[a-zà-ÿ]{3,}|[.,]?$)(?!\scel|\scent)",
        clock=Clock(
            hour=r"(?:\s?(?:h|ore)(?![^\W\d])|(?<=\bore \d\d)(?![.,:]?\d)|(?<=\bore \d)(?![.,:]?\d)"
            r"|(?<=\balle \d\d)(?=[.,;)!?](?!\d)|\s*$))",
            minutes=r"\s?(?:e\s)?(?P<m2>\d\d)(?:\s?min(?:uti)?)?(?![\w])", lasts=True,
            at=r"(?:\b(?:alle|le|dalle|ore|fino alle|verso le)|\ball'|\bl')",
            after={"am": r"\s(?:di mattina|del mattino|di notte)\b", "pm": r"\s(?:di pomeriggio|del pomeriggio|di sera|"
                   r"della sera)\b"},
        ),
        units={"dollari": "usd", "dollaro": "usd", "sterline": "gbp", "yen": "jpy", "rubli": "rub", "per cento": "%",
               "gradi": "degrees", "grado": "degrees", "chilometri orari": "km/h", "chilometri all'ora": "km/h",
               "km all'ora": "km/h"},
        multipliers={"mln": 10**6, "mld": 10**9, "mila": 10**3},
    ),
    "ru": Words(
        yes="да|верно|правда|это так|это верно|это правда|правильно|истина|конечно|совершенно верно|именно так|так и "
        "есть|утверждение верно|ответ да",
        no="нет|неверно|неправда|это не так|это неверно|это неправда|не верно|неправильно|ложь|отнюдь|"
        "утверждение неверно|ответ нет|неверна|не верна|не так|не соответствует действительности",
        regret=r"к сожалению",
        judged=r"(?:это (?:утверждение )?|(?:данное )?утверждение |(?:эта )?информация )",
        sentence=r"\b(?:это|является|являются|был|была|было|были|находится|расположен\w*|составляет|называется|стоит|"
        r"живет|"
        r"живут|есть|имеет|родился|родилась|говорит|говорят|равн[аоы]?|длится|начинается|насчитывает|входят|он|она|"
        r"оно|в|на)\b",
        minus=r"\bминус",
        below=r"(?:ниже нуля|мороза)",
        joins=_and("и|а также"),
        after=RUSSIAN_CASES,
        links=r"(?:от|по)",
        ordinals=r"(?P<n>\d{1,4})-?(?:й|я|е|го|му|м|ю|х|ой|ый|ая)(?![\w])",
        clock=Clock(
            hour=r"\s?(?:час(?:ов|а)?|ч\.?)(?![^\W\d])", minutes=r"\s?(?P<m2>\d{1,2})\s?мин(?:ут[аы]?|\.)?(?!\w)",
                lasts=True,
            at=r"(?:\bв|\bк|\bс|\bдо|\bоколо)",
            after={"am": r"\sутра\b", "pm": r"\s(?:дня|вечера)\b", "night": r"\sночи\b"},
        ),
        units={"доллар": "usd", "доллара": "usd", "долларов": "usd", "фунт": "gbp", "фунтов": "gbp", "фунта": "gbp",
               "рубль": "rub", "рубля": "rub", "рублей": "rub", "руб": "rub", "руб.": "rub", "иена": "jpy",
               "иен": "jpy",
               "градус": "degrees", "градуса": "degrees", "градусов": "degrees", "лет": "year", "год": "year",
               "года": "year", "км/ч": "km/h", "км в час": "km/h", "кв. км": "km2", "м": "m", "г": "g",
               "т": "t", "л": "l", "ч": "h"},
        multipliers={"тыс": 10**3, "млн.": 10**6, "млрд.": 10**9, "тысячами": 10**3, "тысячах": 10**3,
                     "миллионах": 10**6, "миллионами": 10**6, "миллиону": 10**6, "миллиардах": 10**9},
        signs={"ё": "е", "Ё": "Е"},
    ),
    "tr": Words(
        yes="evet|doğru|doğrudur|bu doğru|bu doğrudur|kesinlikle|elbette|tabii|öyle|ifade doğrudur|cevap evet",
        no="hayır|yanlış|yanlıştır|doğru değil|doğru değildir|bu yanlış|bu yanlıştır|bu doğru değil|bu doğru değildir|"
        "değil|değildir|öyle değil|ifade yanlıştır|cevap hayır",
        regret=r"maalesef|ne yazık ki",
        judged=r"(?:(?:bu )?(?:bilgi|ifade|iddia)|bu)",
        sentence=r"(?:d[ıiuü]r|t[ıiuü]r|yor|[dt][ıiuü]|m[ıiuü]ş|'\w{1,6}|[ae]r|var|yok)\W*$|\b(?:olarak|başkenti|olan|"
        r"ve)\b",
        fewest=1,
        minus=r"\beksi",
        joins=_and("ve|ile|ve de"),
        after=rf"'\w{{1,10}}|(?:{TURKISH_CASES})",
        links=r"(?:tarihinde)",
        ordinals=r"(?P<n>\d{1,4})(?:\.(?=\s[a-zçğıöşü])|'?[ıiuü]?nc[ıiuü])",
        clock=Clock(
            hour=r"(?='[dt][ae]n?\b)", lasts=True, at=r"\b(?:saat|saati|saatleri)",
            before={"am": r"\b(?:sabah|gece yarısı)(?:\ssaat)?", "pm": r"\b(?:öğleden sonra|akşam|öğlen)(?:\ssaat)?",
                    "night": r"\bgece(?:\ssaat)?"},
        ),
        units={"dolar": "usd", "doları": "usd", "avro": "eur", "sterlin": "gbp", "lira": "try", "tl": "try",
            "liradır": "try", "derece": "degrees", "kilometrekaredir": "km2", "yen": "jpy", "ruble": "rub",
               "saatte {0} km": "km/h", "saatte {0} kilometre": "km/h"},
    ),
    "fi": Words(
        yes="kyllä|joo|tosi|totta|se on totta|oikein|se pitää paikkansa|pitää paikkansa|aivan",
        no="ei|epätosi|se ei ole totta|ei ole totta|väärin|se ei pidä paikkaansa|ei pidä paikkaansa",
        sentence=r"\b(?:on|ovat|oli|olivat|sijaitsee|maksaa|kestää|asuu|syntyi|puhuu|alkaa|lähtee|se|hän)\b",
        minus=r"\bmiinus",
        below=r"(?:pakkasta|nollan alapuolella)",
        joins=_and("ja|sekä"),
        after=FINNISH_CASES,
        links=r"(?!)",
        ordinals=r"(?P<n>\d{1,4})\.(?=\s[a-zåäö])",
        clock=Clock(at=r"\b(?:kello|klo)"),
        units={"dollaria": "usd", "dollari": "usd", "puntaa": "gbp", "jeniä": "jpy", "ruplaa": "rub", "prosenttia": "%",
               "prosentti": "%", "astetta": "degrees", "kilometriä tunnissa": "km/h", "euroa": "eur"},
        multipliers={"miljoonan": 10**6, "miljardin": 10**9, "tuhannen": 10**3, "milj": 10**6, "mrd": 10**9},
    ),
    "ko": Words(
        yes="네|예|그렇습니다|맞습니다|맞아요|참|참입니다|사실입니다|사실이에요|옳습니다|네 맞습니다|네 그렇습니다|예 "
        "맞습니다|예 그렇습니다|그래요|정답은 예입니다|답은 예입니다|네 맞아요",
        no="아니요|아니오|아닙니다|아니에요|틀립니다|틀렸습니다|거짓|거짓입니다|그렇지 않습니다|사실이 아닙니다|맞지 "
        "않습니다|아니요 그렇지 않습니다|아니요 아닙니다|답은 아니요입니다|사실이 아니에요|아뇨|"
        "틀린 설명입니다|틀린 설명이에요|옳지 않습니다",
        regret=r"아쉽지만|아쉽게도|안타깝지만|안타깝게도|유감스럽지만|죄송하지만",
        judged=r"(?:그건|그것은|이것은|이는|(?:해당|이|그) (?:설명|진술|내용|정보|주장)[은는])",
        sentence=r"(?:다|요|죠|까|임|음)[.!?]?$|[가-힣)](?:은|는|이|가)\s",
        fewest=1,
        minus=r"(?:영하|마이너스)",
        joins=r"(?<=[가-힣a-zA-Z])(?:와|과|이랑|랑|하고)\s|,?\s(?:및|그리고)\s",
        after=rf"(?:{KOREAN_PARTICLES})(?:{KOREAN_PARTICLES})?(?:{KOREAN_PARTICLES})?",
        ordinals=r"제\s?(?P<n>\d{1,4})|(?P<n2>\d{1,4})(?:번째|번 째|등급)",
        touches=True,
        clock=Clock(
            hour=r"\s?시(?!간)", minutes=r"\s?(?P<m2>\d{1,2}(?=\s?분)|반)(?:\s?분)?",
            before={"am": "(?:오전|새벽|아침)", "pm": "(?:오후|저녁|낮)", "night": "(?:밤)"},
        ),
        units={"도": "degrees", "달러": "usd", "원": "krw", "엔": "jpy", "파운드": "gbp", "퍼센트": "%", "프로": "%",
               "킬로": "km", "제곱킬로미터": "km2", "평방킬로미터": "km2", "시간": "h", "년": "year", "개월": "month",
               "시속 {0}km": "km/h", "시속 {0}킬로": "km/h", "루블": "rub", "위안": "cny", "유로": "eur",
               "명": "people"},
    ),
    "ja": Words(
        yes="はい|ええ|そうです|正しい|正しいです|真|真です|その通りです|そのとおりです|本当です|正解です|はいそうです|はい正しいです|答えははいです",
        no="いいえ|違います|ちがいます|偽|偽です|正しくありません|間違いです|間違っています|そうではありません|誤りです|嘘です|"
        "答えはいいえです|いえ|正しくないです|事実ではありません",
        regret=r"残念ながら|申し訳ありませんが",
        judged=r"(?:それ|これ|(?:その|この)(?:記述|説明|主張|情報|答え))は",
        sentence=r"です|ます|でした|ました|である|ません|だ[。.!]?$|[はがを].",
        fewest=1,
        minus=r"(?:氷点下|零下|マイナス)",
        joins=r"(?<=[\u3040-\u30ff\u3400-\u9fffA-Za-zー])(?:と|や|および|及び|そして)|、",
        before=r"[ぁ-ん]|\W",
        after=rf"{JAPANESE_PARTICLES}|\W",
        beside=True,
        ordinals=r"第\s?(?P<n>\d{1,4})|(?P<n2>\d{1,4})(?:番目|代目|回目|人目)",
        touches=False,
        clock=Clock(
            hour=r"\s?時(?!間)", minutes=r"\s?(?P<m2>\d{1,2}(?=\s?分)|半)(?:\s?分)?",
            before={"am": "(?:午前|早朝|朝)", "pm": "(?:午後|夕方|昼)", "night": "(?:夜|深夜)"},
        ),
        units={"度": "degrees", "ドル": "usd", "円": "jpy", "ポンド": "gbp", "ユーロ": "eur", "パーセント": "%",
               "キロ": "km",
               "ウォン": "krw", "元": "cny", "平方キロ": "km2", "日間": "day", "年間": "year", "週間": "week",
               "分間": "min",
               "時間": "h", "か月": "month", "ヶ月": "month", "カ月": "month", "秒間": "s", "ルーブル": "rub",
               "時速{0}km": "km/h", "時速{0}キロ": "km/h", "時速{0}キロメートル": "km/h",
               "時速約{0}km": "km/h", "時速約{0}キロ": "km/h"},
        multipliers={"千": 10**3},
    ),
    "hi": Words(
        yes="हाँ|हां|जी हाँ|जी हां|सही|सही है|यह सही है|सत्य|सच|यह सच है|बिल्कुल|यह सत्य है|उत्तर हाँ है|कथन सत्य है|कथन सही है",
        no="नहीं|जी नहीं|गलत|गलत है|यह गलत है|असत्य|झूठ|यह सच नहीं है|यह सही नहीं है|ऐसा नहीं है|"
        "उत्तर नहीं है|कथन असत्य है|कथन गलत है|सही नहीं है|सच नहीं है",
        regret=r"दुर्भाग्य से|क्षमा करें",
        judged=r"(?:यह|वह)(?: (?:जानकारी|कथन|दावा|बात))?",
        sentence=r"(?:है|हैं|था|थे|थी|थीं|हुआ|हुई|गया|गई|रहा|रहे|रही|में|का|की|के)(?!\w)",
        minus=r"(?:माइनस|ऋण|शून्य से(?=[ ]?\d[\d.]*[ ]\S+(?:[ ]\S+)?[ ](?:नीचे|कम)))",
        joins=_and("और|तथा|एवं|व"),
        links=r"(?:सन्|सन|वर्ष|,)",
        ordinals=r"(?P<n>\d{1,4})(?:वां|वाँ|वें|वीं|वा|वे|वी)",
        touches=True,
        clock=Clock(
            hour=r"\s?(?:बजकर|बजे)", minutes=r"\s?(?P<m2>\d{1,2})\s?मिनट", at=r"(?!)",
            before={"am": "(?:सुबह|प्रातः|तड़के)(?:\\sके)?", "pm": "(?:दोपहर|शाम)(?:\\s(?:के|को))?",
                "night": "(?:रात)(?:\\s(?:के|को))?"},
        ),
        units={"डॉलर": "usd", "रुपये": "inr", "रुपए": "inr", "रुपया": "inr", "रु": "inr", "रु॰": "inr", "यूरो": "eur",
            "येन": "jpy",
               "पाउंड": "gbp", "प्रतिशत": "%", "फीसदी": "%", "फ़ीसदी": "%", "डिग्री": "degrees", "डिग्री फ़ारेनहाइट": "°f",
               "डिग्री फारेनहाइट": "°f", "डिग्री सेंटीग्रेड": "°c", "किमी": "km", "कि.मी.": "km", "मीटर": "m",
               "घंटों": "h", "साल": "year", "सालों": "year", "वर्षों": "year", "दिनों": "day", "मिनटों": "min", "किलो": "kg",
               "महीने": "month", "वर्ग किमी": "km2", "किलोमीटर प्रति घंटा": "km/h", "किमी/घंटा": "km/h",
               "किमी प्रति घंटा": "km/h", "किमी प्रति घंटे": "km/h", "किलोमीटर प्रति घंटे": "km/h"},
        multipliers={"हजार": 10**3, "करोड": 10**7, "लाखों": 10**5, "मिलियन": 10**6, "बिलियन": 10**9, "लाख करोड़": 10**12},
        months={1: "जनवरी", 2: "फरवरी फ़रवरी", 8: "अगस्त", 9: "सितम्बर", 10: "अक्तूबर", 11: "नवम्बर", 12: "दिसम्बर"},
        signs={"।": ". ", "॥": ". "},
    ),
    "th": Words(
        yes="ใช่|ใช่ครับ|ใช่ค่ะ|ใช่แล้ว|ใช่แล้วครับ|ใช่แล้วค่ะ|ถูก|ถูกต้อง|ถูกต้องครับ|ถูกต้องค่ะ|จริง|เป็นความจริง|เป็นจริง|ครับ ใช่|คำตอบคือใช่",
        no="ไม่|ไม่ใช่|ไม่ใช่ครับ|ไม่ใช่ค่ะ|ไม่ครับ|ไม่ค่ะ|ไม่ถูกต้อง|ไม่จริง|ผิด|เท็จ|ไม่เป็นความจริง|ไม่เป็นจริง|คำตอบคือไม่ใช่|คำตอบคือไม่",
        regret=r"ขออภัย|น่าเสียดาย",
        judged=r"(?:ข้อมูล|ข้อความ|คำกล่าว)(?:นี้|นั้น)(?:เป็น)?",
        polite=r"(?:นะ)?(?:ครับ|ค่ะ|คะ)",
        sentence=r"คือ|เป็น|อยู่|มี|ได้แก่|หมายถึง|ใช้|เริ่ม|ครับ|ค่ะ|ใน|ที่|ชื่อ|ของ|ประมาณ|ราคา",
        fewest=1,
        minus=r"(?:ติดลบ|ลบ)",
        below=r"ใต้ศูนย์",
        joins=r"\s?และ\s?|\s?กับ\s?",
        before=rf"(?:{THAI_BEFORE})|[^\u0e00-\u0e7f]",
        after=rf"(?:{THAI_AFTER})|[^\u0e00-\u0e7f]",
        beside=True,
        links=r"(?:เดือน|ปี|ค\.ศ\.|พ\.ศ\.|ปี ค\.ศ\.|ปี พ\.ศ\.)",
        ordinals=r"(?:ครั้งที่|คนที่|อันดับที่|อันดับ|บทที่|วันที่|ลำดับที่|คนที่|เป็นที่)\s?(?P<n>\d{1,4})",
        touches=True,
        clock=Clock(
            hour=r"\s?(?:นาฬิกา|น\.(?!\w)|โมง)", minutes=r"\s?(?P<m2>\d{1,2})\s?นาที", at=r"(?:เวลา)",
            before={"am": "(?:เวลา\\s?)?ตี", "pm": "บ่าย(?:\\sเวลา)?"},
            after={"am": r"\s?(?:โมง)?เช้า", "pm": r"\s?(?:โมง)?เย็น", "evening": r"\s?ทุ่ม"},
        ),
        units={"ดอลลาร์": "usd", "บาท": "thb", "ยูโร": "eur", "เยน": "jpy", "ปอนด์": "gbp", "เปอร์เซ็นต์": "%",
            "องศา": "degrees", "กิโล": "kg",
               "ร้อยละ {0}": "%", "กม": "km", "ตร.กม.": "km2", "กิโลเมตรต่อชั่วโมง": "km/h",
               "กม./ชม.": "km/h", "กม.ต่อชั่วโมง": "km/h", "วอน": "krw", "หยวน": "cny", "รูเบิล": "rub"},
    ),
    "vi": Words(
        tonal=True,
        yes="có|vâng|đúng|đúng vậy|đúng rồi|phải|chính xác|điều đó đúng|điều này đúng|đúng thế|dạ|dạ đúng|dạ có|dạ "
        "vâng|câu trả lời là có|là đúng|khẳng định này đúng",
        no="không|sai|không đúng|không phải|không phải vậy|điều đó sai|điều này sai|điều đó không đúng|điều này không "
        "đúng|sai rồi|dạ không|câu trả lời là không|là sai|khẳng định này sai|không chính xác",
        regret=r"rất tiếc|tiếc là|xin lỗi",
        judged=r"(?:điều (?:đó|này)|(?:thông tin|khẳng định|phát biểu) (?:này|đó|trên))(?: là)?",
        sentence=r"\b(?:là|có|được|nằm|ở|của|khoảng|gồm|bao|cao|dài|giá|thuộc|sinh)\b",
        minus=r"\bâm",
        below=r"dưới (?:không|0)",
        joins=_and("và|cùng|với"),
        links=r"(?:năm|tháng|,)",
        ordinals=r"\b(?:thứ|ngày|tháng)\s(?P<n>\d{1,4})(?![\d/.-])",
        clock=Clock(
            hour=r"\s?(?:giờ|h|g)(?![^\W\d])", minutes=r"\s?(?P<m2>\d\d|\d{1,2}(?=\s?phút))(?:\s?phút)?(?![\w])",
                lasts=True,
            at=r"\b(?:lúc|vào|từ|đến)",
            after={"am": r"\s(?:sáng)\b", "pm": r"\s(?:chiều|tối|trưa)\b", "night": r"\s(?:đêm)\b"},
        ),
        units={"đô la": "usd", "đô": "usd", "đồng": "vnd", "đ": "vnd", "vnđ": "vnd", "euro": "eur", "yên": "jpy",
            "bảng": "gbp",
               "phần trăm": "%", "độ": "degrees", "tiếng": "h", "cây số": "km", "ki-lô-mét": "km", "mét": "m",
               "km/giờ": "km/h", "km một giờ": "km/h", "km mỗi giờ": "km/h", "ki-lô-mét vuông": "km2",
               "mét vuông": "m2", "kilômét": "km", "ki-lô-gam": "kg", "tấn": "t"},
        multipliers={"ngàn": 10**3, "tỉ": 10**9, "nghìn tỉ": 10**12, "ngàn tỷ": 10**12},
    ),
    "ar": Words(
        yes="نعم|أجل|صحيح|هذا صحيح|صح|بلى|بالتأكيد|بالطبع|العبارة صحيحة|الإجابة نعم|الإجابة هي نعم|حقيقي",
        no="لا|كلا|خطأ|غير صحيح|هذا غير صحيح|هذا خطأ|ليس صحيحا|هذا ليس صحيحا|خاطئ|العبارة خاطئة|الإجابة لا|الإجابة هي "
        "لا|غير صحيحة|خاطئة|غير دقيق|غير دقيقة|ليست صحيحة",
        regret=r"للاسف",
        judged=r"(?:(?:هذه )?(?:العبارة|المعلومة|المقولة|الإجابة)|هذا|هذه)(?: هي)?",
        sentence=r"\b(?:هي|هو|إنها|انها|انه|تقع|يقع|في|كان|كانت|يبلغ|تبلغ|هم|من|يساوي|تسمى|يسمى|ولد|ولدت|عاصمة|على)\b",
        minus=r"(?:سالب|ناقص)",
        below=r"تحت الصفر",
        joins=r",?\s(?:و\s|و(?=\w{2}))",
        before=r"[وف]?(?:ال|ب|ك|ل|بال|كال|لل|س)?",
        links=r"(?:من|عام|سنة|لعام|شهر|/\s?\w{3,8})",
        ordinals=r"(?P<n>(?!))",
        touches=True,
        clock=Clock(
            hour=r"(?!)", at=r"(?:الساعة|الساعه)(?:\sال)?",
            after={"am": r"\s(?:صباحا|فجرا|في الصباح|ص)(?!\w)", "pm": r"\s(?:مساء|ظهرا|عصرا|بعد الظهر|في المساء|"
            r"م)(?!\w)",
                   "night": r"\s(?:ليلا)(?!\w)"},
        ),
        units={"دولار": "usd", "دولارا": "usd", "دولارات": "usd", "يورو": "eur", "ين": "jpy", "درهم": "aed",
            "درهما": "aed",
               "روبل": "rub", "في المائة": "%", "في المئة": "%", "بالمئة": "%", "بالمائة": "%", "%{0}": "%",
               "درجة": "degrees", "كم": "km",
               "كيلومترا": "km", "مترا": "m", "دقيقة": "min", "ساعات": "h", "سنوات": "year", "سنة": "year",
               "عاما": "year", "أعوام": "year",
               "أيام": "day", "يوما": "day", "كيلوغراما": "kg", "كم/ساعة": "km/h", "كم/س": "km/h",
               "كم في الساعة": "km/h", "كيلومترا في الساعة": "km/h", "كيلومترا مربعا": "km2", "كم مربع": "km2"},
        multipliers={"ألفا": 10**3, "الف": 10**3, "مليونا": 10**6, "بليون": 10**9, "تريليون": 10**12, "مليارا": 10**9,
            "مليارات": 10**9},
        regions=("ar_SY", "ar_DZ"),
        signs={"،": ", ", "؛": "; ", "؟": "?", "٫": ".", "٬": ",", "٪": "%", "أ": "ا", "إ": "ا", "آ": "ا", "ى": "ي",
               "\u0640": "", "\u200f": "", "\u200e": "", "\u061c": ""}
        | {chr(mark): "" for mark in range(0x064B, 0x0653)},
    ),
}  # fmt: skip
"""By ISO 639-1 code. English and Chinese are what `quantities`, `dates` and `readings` read by themselves."""
