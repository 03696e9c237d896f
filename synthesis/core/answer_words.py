"""Words that commit a final answer to a value, or take it back, in the languages of `locales.READ`.

`final_answers` reads them. All fields are parts of regular expressions, matched without heed of case against text that
`Locale.spelled` made. English and Chinese count in every language, since answers mix them in.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from unicode_rbnf import FormatPurpose, RbnfEngine

from synthesis.core.locales import locale_of
from synthesis.core.normal_text import normalized


@dataclass(frozen=True)
class AnswerWords:
    """The words of one language.

    Attributes:
        negation: negates the value behind it: "not", "neither".
        negated: negates the value before it: "is wrong", 不对.
        contrast: between what is rejected and what is stated: "but", "rather".
        either: "or".
        ranges: "to", between the ends of a range.
        than: before a value that the answer is only compared with.
        corrects: at the start of a clause, takes back what was said before.
        reports: the writer's own earlier opinion: "I thought".
        unsure: at the start of a clause that supposes something: "if", "whether".
        mark: "the answer is".
        generic: words that say nothing of a value: "it is", "maybe".
        bounds: before a value that only bounds the answer or is an example of it: "at least", "up to", "such as".
        bounded: behind such a value: "or more", "is one of the options".
        joins: "and"; languages with a `Locale` have it there.
    """

    negation: str
    negated: str
    contrast: str
    either: str
    ranges: str
    than: str
    corrects: str
    reports: str
    unsure: str
    mark: str
    generic: str
    bounds: str
    bounded: str
    joins: str = r"(?!)"


_WORDS: Final[dict[str, AnswerWords]] = {
    "en": AnswerWords(
        negation=r"(?:not|cannot|never|neither|nor|\w{2,6}n't|without|except|excluding|rule[sd]? out|rather than|"
        r"instead of|other than|any(?:thing|where|one) but|hardly|no longer|far from|wrong that|false that|"
        r"(?<!no )(?<!not )(?<!n't )(?<!without )doubt)\b"
        r"(?! (?:only|just|merely|until|sure|certain|more|less|fewer|later|earlier)\b)",
        negated=r"(?:is|are|was|were|'s|would be|seems?)\s?(?:n't|\snot)\s(?:(?:the|a) )?"
        r"(?:\w+ )?(?:correct|right|it|true|answer|solution|result|value|number|one|case)\b"
        r"|(?:is|was)(?:n't|\snot) the (?!only)\w+|(?:is|are|was|were|would be|seems?) (?:also |clearly |"
        r"simply )?(?:wrong|incorrect|false|untrue|impossible)\b"
        r"|can(?:not|'t| not) be (?:right|correct|it|true|the)\b|does(?:n't| not) (?:fit|work|count)\b",
        contrast=r"(?<!anything )(?<!anywhere )(?<!anyone )but|rather|instead|however|whereas|yet",
        either=r"or(?: else)?|and/or|versus|vs|alternatively|otherwise|(?<!thing )else",
        ranges=r"to|through|till|until|up to",
        than=r"than|compared (?:to|with)|in contrast to|(?:up|down) from|relative to|as opposed to|following|unlike",
        corrects=r"wait|hold on|correction|actually|sorry|or rather|i mean|scratch that|on second thoughts?|my mistake|"
        r"oops|i was wrong|let me (?:correct|rephrase|recheck)|make that|"
        r"no(?:pe)?(?=$|\s(?:it|that|this|the|there|wait|sorry|actually|make|i)\b|\s[\d\ue000-\ue0ff])|"
        r"(?:that|this|it)(?:'s| is| was) (?:wrong|incorrect|not (?:right|correct|true))|just kidding",
        reports=r"(?:said|thought|guessed|assumed|believed|expected|estimated|first|initially|originally|previously)",
        unsure=r"if|whether|unless|suppose|supposing|assuming|in case|had it been|"
        r"(?:you asked|you want(?:ed)? to know|the question (?:is|was))(?![^:]{0,200}:)",
        mark=r"(?:answer|solution)(?: to [^.:?!\n]{1,80}?)?(?:\s?:|\s?=| is| was| would be| should be)"
        r"|(?:final|overall) (?:result|value|number|answer)(?:\s?:|\s?=| is)|\banswer$",
        bounds=r"at (?:the |a )?(?:least|most|minimum|maximum)|(?:no|not) (?:more|less|fewer|later|earlier) than|"
        r"(?<!\d )up to|(?<!all )over|under|above|below|upwards of|a (?:minimum|maximum) of|as (?:many|much|few|"
        r"little) as|for (?:example|instance)|such as|e\.g\.?,?|(?:refuse|decline)s? to (?:say|name)",
        bounded=r"(?:or|and) (?:so,? or )?(?:more|fewer|less|greater|higher|lower|larger|smaller|over|under|"
        r"above|below|beyond|up|upwards?|later|earlier|after|before)\b|(?:at (?:the )?(?:least|most|"
        r"earliest|latest)|minimum|maximum|upwards?)\b|(?:is|are|was|would be) (?:only |just )?(?:one|"
        r"among) (?:of )?(?:the |many |several |my |possible )*(?:possib\w+|options?|candidates?|"
        r"guess(?:es)?|answers?|choices)",
        generic=r"it|its|it's|is|are|was|were|be|been|that|that's|this|these|those|there|there's|the|a|an|answer|final|"
        r"correct|right|result|solution|value|number|so|thus|hence|therefore|then|maybe|perhaps|possibly|probably|"
        r"likely|surely|certainly|definitely|approximately|approx|about|around|roughly|nearly|almost|exactly|only|just|"
        r"i|we|you|my|think|guess|believe|would|could|might|may|can|should|say|said|of|one|either|both|any|some|also|"
        r"too|well|ok|okay|sure|hello|hmm|yes|please|else|even|again|option|guess|candidate|candidates|choice|between|"
        r"from|among|first|second|third|fourth|fifth|last|next|and|or|to|equals|equal|namely|called|named|located|"
        r"have|has|had|anything|anywhere|somewhere|ranges?|ranging|most|more|less|thanks|great|done|[a-h]",
        joins=r"\s(?:and|&|as well as)\s",
    ),
    "zh": AnswerWords(
        negation=r"(?:并不是|并非|不是|绝不是|绝非|不会是|不可能是|不应该是|不应是|不等于|不在|不为|不叫|没有|从未|从不|而非|"
        r"除了|除|既非|也非|并不|不认为|否认)(?!问题|错|疑问|只|仅|但)",
        negated=r"(?:是|都|也|并)?(?:不对|不正确|错误|错的|是错|不成立|不是答案|不是正确|不可能|是假的)",
        contrast=r"而是|但是|但|不过|然而|反而",
        either=r"否则|不然|还是|或者|或是|或",
        ranges=r"到|至",
        than=r"(?<![同环年分对占])比(?![例率较重])|相比|相较于|高于|低于|多于|少于|超过|不同于",
        corrects=r"不对|等等|等一下|更正|抱歉|对不起|准确地说|错了|哦不|不$|其实(?:应该)?是|应该说|我错了|说错了|实际上是",
        reports=r"(?:刚才说|之前说|我说|以为|原以为|本来以为|曾认为|最初认为|起初)",
        unsure=r"如果|假如|假设|若|是否|倘若|要是|(?:你|您)(?:想)?(?:问|知道)(?![^:]{0,200}:)",
        mark=r"(?:正确|最终|最后)?(?:的)?(?:答案|结果)(?:应该|应)?(?:是|为|:|=)",
        bounds=r"不(?:少|低|多|大|小|高|早|晚)于|不(?:超过|到|足|及)|[至最](?:少|多)(?:有|是|为)?|起码|上限[是为]?|下限[是为]?|例如|比如|譬如|超过|大于|"
        r"小于|[≥≤]",
        bounded=r"(?:个|人|件|米|年|天|元)?(?:多|以[上下内外]|之[上内]|及以[上下]|或(?:以上|以下|更[多少高低大小])|起)|(?:只)?(?:是|"
        r"为)?(?:其中)?(?:之一|一种可能|一个(?:可能|选项|例子))",
        generic=r"答案|结果|最终|正确|这|那|它|就是|是|为|有|应该|可能|也许|或许|大概|大约|约|左右|一共|共|总共|总数|总计|"
        r"我|认为|觉得|猜|因此|所以|那么|其中|之一|要么|也|都|共有|数字|选项|等于|的|了|吧|呢|个|介于|之间|在|从",
        joins=r"(?:和|与|及|以及|跟)",
    ),
    "de": AnswerWords(
        negation=r"(?:nicht|nie|niemals|weder|noch|kein(?:e[rsnm]?)?|ohne|außer|statt|anstatt)\b(?! (?:nur|"
        r"mehr als|sicher))",
        negated=r"(?:ist|sind|war|stimmt|wäre)(?: es| das)? (?:nicht(?: (?:die|der|das|richtig|korrekt|wahr|"
        r"\w+ antwort)|$)|"
        r"falsch|unmöglich|inkorrekt)|nicht$",
        contrast=r"sondern|aber|jedoch|vielmehr|allerdings",
        either=r"oder|ansonsten|sonst|alternativ|bzw\.?|beziehungsweise", ranges=r"bis",
        than=r"als|verglichen mit|im vergleich zu|gegenüber",
        corrects=r"nein|moment|warte|korrektur|eigentlich|entschuldigung|besser gesagt|ich meine|quatsch|doch nicht",
        reports=r"(?:sagte|dachte|glaubte|zuerst|zunächst|anfangs)",
        unsure=r"wenn|falls|ob|angenommen|sofern",
        mark=r"(?:antwort|lösung|ergebnis)(?: auf [^.:?!\n]{1,80}?)?(?:\s?:|\s?=| ist| lautet| wäre)",
        bounds=r"mindestens|höchstens|maximal|minimal|wenigstens|bis zu|über|unter|zum beispiel|z\.\s?b\.",
        bounded=r"(?:oder|und) (?:mehr|weniger|höher|niedriger|darüber|darunter|später|früher)\b|"
        r"(?:mindestens|höchstens|aufwärts)\b",
        generic=r"es|ist|sind|war|waren|das|die|der|den|dem|ein|eine|antwort|lautet|ergebnis|lösung|also|somit|daher|"
        r"vielleicht|möglicherweise|wahrscheinlich|vermutlich|ungefähr|etwa|rund|ca|ich|glaube|denke|könnte|von|eines|"
        r"entweder|auch|gibt|zwischen|wert|zahl|und|oder|bis|genau|wohl",
    ),
    "fr": AnswerWords(
        negation=r"(?:pas|non|jamais|ni|aucune?|sans|sauf|excepté|plutôt que|au lieu de|n'est|ne sont)\b"
        r"(?! (?:seulement|plus de|moins de|sûr))",
        negated=r"(?:est|sont|serait|était) (?:faux|fausse|incorrecte?|inexacte?)|"
        r"n'est pas (?:la|le|correcte?|exacte?|vrai|juste|bonne?|ça)",
        contrast=r"mais|plutôt|cependant|toutefois|par contre", either=r"ou(?: bien)?|sinon|alternativement",
        ranges=r"à|jusqu'à",
        than=r"que|par rapport à|comparé à|contre",
        corrects=r"non|attendez|attends|correction|en fait|en réalité|pardon|désolée?|ou plutôt|je veux dire",
        reports=r"(?:disais|pensais|croyais|dit|pensé|cru|d'abord)", unsure=r"si|à supposer|supposons",
        mark=r"(?:réponse|solution|résultat)(?: à [^.:?!\n]{1,80}?)?(?:\s?:|\s?=| est| serait)",
        bounds=r"au (?:moins|plus|minimum|maximum)|plus de|moins de|jusqu'à|par exemple",
        bounded=r"(?:ou|et) (?:plus|moins|davantage)\b|(?:au (?:moins|plus|minimum|maximum)|minimum|maximum)\b",
        generic=r"il|c'est|ce|est|sont|était|la|le|les|l|un|une|réponse|résultat|solution|donc|ainsi|alors|peut-être|"
        r"probablement|environ|à|peu|près|je|pense|crois|dirais|pourrait|être|des|de|du|d|y|a|soit|entre|aussi|et|ou|"
        r"nombre|valeur|exactement|s'agit|peut",
    ),
    "es": AnswerWords(
        negation=r"(?:no|nunca|jamás|ni|tampoco|sin|excepto|salvo|en lugar de|en vez de)\b"
        r"(?! (?:solo|sólo|solamente|más de|menos de))",
        negated=r"(?:es|son|era|sería) (?:falso|falsa|incorrecto|incorrecta)|"
        r"no (?:es|son|era) (?:la|el|correcto|correcta|cierto|verdad|eso)",
        contrast=r"sino|pero|más bien|sin embargo", either=r"o(?: bien)?|u|alternativamente", ranges=r"a|hasta",
        than=r"que|comparado con|frente a|en comparación con",
        corrects=r"espera|espere|corrección|en realidad|perdón|perdona|mejor dicho|quiero decir|no(?=$|\s(?:es|son))",
        reports=r"(?:dije|pensé|pensaba|creía|creí|primero)", unsure=r"si|suponiendo|en caso",
        mark=r"(?:respuesta|solución|resultado)(?: a [^.:?!\n]{1,80}?)?(?:\s?:|\s?=| es| sería)",
        bounds=r"al menos|por lo menos|como (?:mínimo|máximo)|a lo (?:sumo|más)|más de|menos de|por ejemplo",
        bounded=r"[oy] (?:más|menos)\b|(?:al menos|como (?:mínimo|máximo)|mínimo|máximo)\b",
        generic=r"es|son|era|está|hay|la|el|los|las|lo|un|una|respuesta|resultado|solución|por|tanto|entonces|"
        r"así|quizás?|"
        r"tal|vez|probablemente|aproximadamente|unos|unas|cerca|de|creo|podría|ser|puede|entre|y|o|u|también|uno|se|"
        r"trata|número|valor|exactamente",
    ),
    "pt": AnswerWords(
        negation=r"(?:não|nunca|jamais|nem|tampouco|sem|exceto|em vez de)\b(?! (?:só|apenas|somente|mais de|menos de))",
        negated=r"(?:é|são|era|seria|está) (?:falso|falsa|errado|errada|incorreto|incorreta)|"
        r"não (?:é|são|era|está) (?:a|o|correto|correta|certo|certa|verdade|isso)",
        contrast=r"mas|e sim|senão|porém|no entanto", either=r"ou", ranges=r"a|até",
        than=r"que|comparado com|em comparação com",
        corrects=r"espera|espere|correção|na verdade|desculpe|desculpa|aliás|ou melhor|quero dizer|não(?=$|"
        r"\s(?:é|são))",
        reports=r"(?:disse|pensei|pensava|achava|achei|primeiro)", unsure=r"se|supondo|caso",
        mark=r"(?:resposta|solução|resultado)(?: a [^.:?!\n]{1,80}?)?(?:\s?:|\s?=| é| seria)",
        bounds=r"(?:pelo|ao) menos|no (?:mínimo|máximo)|mais de|menos de|por exemplo",
        bounded=r"(?:ou|e) (?:mais|menos)\b|(?:(?:pelo|ao) menos|no (?:mínimo|máximo))\b",
        generic=r"é|são|era|está|há|a|o|os|as|um|uma|resposta|resultado|solução|portanto|então|assim|talvez|"
        r"provavelmente|"
        r"aproximadamente|cerca|de|acho|poderia|ser|pode|entre|e|ou|também|trata|se|número|valor|exatamente|"
        r"possivelmente",
    ),
    "it": AnswerWords(
        negation=r"(?:non|mai|né|nessun[oa]?|senza|tranne|eccetto|invece di|neanche|nemmeno)\b"
        r"(?! (?:solo|soltanto|più di|meno di))",
        negated=r"(?:è|sono|era|sarebbe) (?:falso|falsa|sbagliat[oa]|errat[oa])|"
        r"non (?:è|sono|era) (?:la|il|corrett[oa]|giust[oa]|vero|quell[oa])",
        contrast=r"ma|bensì|piuttosto|però|tuttavia", either=r"o|oppure|ovvero", ranges=r"a|fino a",
        than=r"di quanto|rispetto a|contro",
        corrects=r"no|aspetta|aspetti|correzione|anzi|in realtà|scusa|scusi|o meglio|voglio dire",
        reports=r"(?:detto|dissi|pensavo|credevo|prima)", unsure=r"se|supponendo",
        mark=r"(?:risposta|soluzione|risultato)(?: a [^.:?!\n]{1,80}?)?(?:\s?:|\s?=| è| sarebbe)",
        bounds=r"almeno|al (?:massimo|minimo|più|meno)|più di|meno di|oltre|per esempio|ad esempio",
        bounded=r"[oe] (?:più|meno)\b|(?:almeno|al (?:massimo|minimo|più|meno)|minimo|massimo)\b",
        generic=r"è|sono|era|ci|c'è|la|il|lo|i|le|un|una|risposta|risultato|soluzione|quindi|dunque|allora|forse|"
        r"probabilmente|circa|credo|penso|potrebbe|essere|può|tra|fra|e|o|anche|uno|di|si|tratta|numero|valore|"
        r"esattamente",
    ),
    "ru": AnswerWords(
        negation=r"(?:не|ни|никогда|нет|кроме|без|вместо)\b(?! (?:только|более|менее|меньше|больше))",
        negated=r"(?:—|-)?\s?(?:это )?(?:неверно|неправильно|ложно|не (?:ответ|верно|правильно|то|так)|неверный ответ)",
        contrast=r"а|но|однако|зато", either=r"или|либо|иначе", ranges=r"до", than=r"чем|по сравнению с",
        corrects=r"нет|подождите|подожди|стоп|исправление|точнее|вернее|на самом деле|извините|простите|то есть",
        reports=r"(?:сказал|сказала|думал|думала|считал|считала|сначала)", unsure=r"если|ли|допустим|предположим",
        mark=r"(?:ответ|результат|решение)(?: на [^.:?!\n]{1,80}?)?(?:\s?:|\s?=|\s?[-—]| это)",
        bounds=r"(?:не )?(?:более|менее|больше|меньше)(?: чем)?|свыше|(?:как )?(?:минимум|максимум)|"
        r"по (?:крайней|меньшей) мере|самое (?:большее|меньшее)|например",
        bounded=r"(?:или|и) (?:более|менее|больше|меньше|выше|ниже)\b|(?:минимум|максимум)\b",
        generic=r"это|есть|был|была|было|были|ответ|результат|итак|значит|поэтому|таким|образом|может|быть|возможно|"
        r"наверное|вероятно|примерно|около|приблизительно|я|думаю|считаю|один|из|также|и|или|от|до|между|число|"
        r"ровно|он|она",
    ),
    "tr": AnswerWords(
        negation=r"(?:ne|hiçbir|asla|hariç|dışında)\b",
        negated=r"(?:\S{0,4}\s)?(?:değil|değildir|yanlış|yanlıştır|doğru değil|olamaz|yok)\b",
        contrast=r"ama|fakat|ancak|aksine|bilakis", either=r"veya|ya da|yahut|yoksa", ranges=r"ila|ile",
        than=r"göre|kıyasla",
        corrects=r"hayır|bekle|bekleyin|düzeltme|aslında|pardon|özür dilerim|daha doğrusu|yani",
        reports=r"(?:demiştim|dedim|sanmıştım|düşünmüştüm|önce)", unsure=r"eğer|şayet",
        mark=r"(?:cevap|yanıt|sonuç|cevabı|yanıtı)(?:\s?:|\s?=|,|\s)",
        bounds=r"en (?:az|fazla|çok)|örneğin",
        bounded=r"(?:\S{0,5} )?(?:veya|ve|ya da)? ?(?:daha )?(?:fazla|az|üzeri|üstü|altı)\b",
        generic=r"bu|o|cevap|yanıt|sonuç|cevabı|yani|belki|muhtemelen|galiba|yaklaşık|civarı|sanırım|bence|"
        r"olabilir|biri|"
        r"ya|da|de|ve|veya|ile|arasında|sayı|değer|tam|olarak|dir|dır",
    ),
    "fi": AnswerWords(
        negation=r"(?:ei|eivät|en|et|emme|ette|älä|eikä|paitsi|ilman)\b(?! (?:vain|ainoastaan))",
        negated=r"(?:on|olisi|ovat) (?:väärin|väärä|virheellinen)|ei (?:ole|pidä)\b",
        contrast=r"vaan|mutta|kuitenkin", either=r"tai|vai|taikka", ranges=r"-", than=r"kuin|verrattuna",
        corrects=r"ei(?=$|\sse)|hetkinen|odota|korjaus|oikeastaan|anteeksi|tai siis|siis ei",
        reports=r"(?:sanoin|luulin|ajattelin|ensin)", unsure=r"jos|mikäli",
        mark=r"(?:vastaus|tulos|ratkaisu)(?:\s?:|\s?=| on| olisi)",
        bounds=r"vähintään|enintään|korkeintaan|ainakin|yli|alle|esimerkiksi",
        bounded=r"tai (?:enemmän|vähemmän|yli|alle)\b",
        generic=r"se|on|ovat|oli|olivat|vastaus|tulos|siis|joten|ehkä|kenties|luultavasti|noin|suunnilleen|luulen|"
        r"voisi|olla|voi|yksi|myös|ja|tai|joko|välillä|luku|arvo|tasan|tämä",
    ),
    "vi": AnswerWords(
        negation=r"(?:không(?: phải)?|chưa|chẳng|đừng|ngoại trừ|trừ)\b(?! (?:chỉ|những))",
        negated=r"(?:là )?(?:sai|không đúng|không phải)\b", contrast=r"mà(?: là)?|nhưng|tuy nhiên|thay vào đó",
        either=r"hoặc|hay", ranges=r"đến|tới", than=r"hơn|so với",
        corrects=r"không(?=$|\slà)|khoan|đợi đã|chờ đã|đính chính|thực ra|xin lỗi|đúng hơn|ý tôi là|à không",
        reports=r"(?:đã nói|tưởng|nghĩ rằng|ban đầu)", unsure=r"nếu|liệu|giả sử",
        mark=r"(?:đáp án|câu trả lời|kết quả|trả lời)(?:\s?:|\s?=| là)",
        bounds=r"ít nhất|nhiều nhất|tối (?:thiểu|đa)|không quá|hơn|trên|dưới|chẳng hạn|ví dụ",
        bounded=r"(?:\w+ )?(?:trở (?:lên|xuống))|(?:hoặc|hay) (?:hơn|ít hơn)",
        generic=r"là|có|đó|này|nó|đáp|án|câu|trả|lời|kết|quả|vậy|nên|do|có thể|thể|lẽ|khoảng|chừng|tôi|nghĩ|một|"
        r"trong|số|"
        r"cũng|và|hoặc|hay|từ|đến|giữa|giá|trị|đúng",
    ),
    "hi": AnswerWords(
        negation=r"(?:न तो|ना ही|न ही|के बजाय|के अलावा)",
        negated=r"(?:\S{1,12}\s){0,2}(?:नहीं|गलत|ग़लत|मत)", contrast=r"बल्कि|लेकिन|परंतु|मगर|किंतु",
        either=r"या|अथवा", ranges=r"से", than=r"की तुलना में|से अधिक|से कम",
        corrects=r"नहीं|रुकिए|रुको|सुधार|दरअसल|वास्तव में|माफ़ कीजिए|क्षमा करें|मेरा मतलब",
        reports=r"(?:कहा था|सोचा था|पहले)", unsure=r"अगर|यदि|क्या",
        mark=r"(?:उत्तर|जवाब|परिणाम)(?:\s?:|\s?=| है)?",
        bounds=r"कम से कम|(?:अधिक|ज़्यादा) से (?:अधिक|ज़्यादा)|न्यूनतम|अधिकतम",
        bounded=r"(?:से|या) (?:अधिक|कम|ज़्यादा)",
        generic=r"यह|वह|है|हैं|था|थी|थे|उत्तर|जवाब|परिणाम|इसलिए|तो|शायद|संभवतः|लगभग|करीब|मुझे|लगता|कि|हो|सकता|सकती|"
        r"एक|में|से|भी|और|या|के|का|की|बीच|संख्या|ठीक|कुल",
    ),
    "ar": AnswerWords(
        negation=r"(?:ليس|ليست|ليسوا|لا|لم|لن|غير|بدون|باستثناء|ما عدا|ولا|لست)(?=\s)(?! (?:فقط|شك))",
        negated=r"(?:(?:هو|هي) )?(?:خطأ|خاطئ|خاطئة|غير صحيح|غير صحيحة|ليس صحيحا|ليست صحيحة|ليس الجواب|ليست الإجابة)",
        contrast=r"بل|لكن|ولكن|وإنما|إنما", either=r"أو|أم|إما", ranges=r"إلى|حتى", than=r"من|مقارنة بـ?|مقابل",
        corrects=r"لا(?=$|\s(?:هو|هي|انها|انه))|انتظر|لحظة|تصحيح|في الواقع|عفوا|آسف|بل|أقصد",
        reports=r"(?:قلت|ظننت|اعتقدت|كنت أظن|أولا)", unsure=r"إذا|لو|إن كان|هل",
        mark=r"(?:الإجابة|الجواب|النتيجة)(?: النهائية| النهائي| الصحيحة| الصحيح)?(?:\s?:|\s?=| هي| هو)",
        bounds=r"على (?:الأقل|الأكثر)|لا (?:يقل|تقل|يزيد|تزيد) عن|(?:أكثر|أقل) من|مثلا",
        bounded=r"(?:أو|ف)\s?(?:أكثر|أقل)|(?:\S+ )?على (?:الأقل|الأكثر)",
        generic=r"هو|هي|هذا|هذه|إنه|إنها|كان|كانت|الإجابة|الجواب|النتيجة|إذن|لذلك|ربما|قد|يكون|تكون|حوالي|نحو|تقريبا|"
        r"أعتقد|أظن|أن|واحد|واحدة|من|أيضا|و|أو|إما|بين|إلى|العدد|الرقم|القيمة",
    ),
    "ja": AnswerWords(
        negation=r"(?:以外|を除く|ではなく|でなく|じゃなく)",
        negated=r"[^、。\n]{0,6}?(?:では(?:ありません|ない|なく)|じゃ(?:ありません|ない|なく)|でない|"
        r"(?:は|が)?(?:間違い|誤り|違います|違う|ありません)|とは限りません)",
        contrast=r"ではなく|でなく|じゃなくて|しかし|むしろ|ですが",
        either=r"または|もしくは|あるいは|それとも|か(?=[\d\ue000-\ue0ff])",
        ranges=r"から|~", than=r"より|に比べて",
        corrects=r"いいえ|いや|待って|待ってください|訂正|実は|すみません|失礼|というか|正確には|違います|違う",
        reports=r"(?:と言いました|と言った|と思っていました|と思った|最初)", unsure=r"もし|仮に",
        mark=r"(?:答え|正解|回答|答|結果)(?:は|:|=)",
        bounds=r"少なくとも|最低(?:でも)?|最[大多]で?も?|多くとも|せいぜい|例えば",
        bounded=r"[個人件本年円]?(?:以[上下内]|未満|超|余り|を(?:超え|上回|下回))",
        generic=r"これ|それ|は|が|です|でした|だ|である|答え|正解|回答|結果|たぶん|おそらく|多分|約|およそ|ほど|くらい|ぐらい|"
        r"かもしれません|と思います|と|も|の|か|つまり|よって|全部で|合計|個|人|間",
    ),
    "ko": AnswerWords(
        negation=r"(?:말고|제외|빼고)",
        negated=r"\S{0,4}\s?(?:아니|아닙|아닌|틀렸|틀립|틀린|않|없습|없다|잘못)",
        contrast=r"아니라|하지만|그러나|대신|오히려|지만", either=r"또는|혹은|아니면|이거나|거나", ranges=r"에서|부터",
        than=r"보다|에 비해",
        corrects=r"아니요|아니오|아니|잠깐|잠깐만요|정정|사실|죄송합니다|다시 말해",
        reports=r"(?:말했지만|생각했|처음에)", unsure=r"만약|만일",
        mark=r"(?:정답|답|답변|결과)(?:은|는|:|=)",
        bounds=r"최소|최대|적어도|많아야|기껏해야|예를 들어",
        bounded=r"[개명건년원]?\s?(?:이상|이하|미만|초과|넘)",
        generic=r"그것은|이것은|답은|정답은|정답|답|결과는|결과|입니다|이다|이에요|예요|아마|아마도|약|대략|정도|일|것|수도|"
        r"있습니다|같습니다|생각합니다|저는|그래서|따라서|또한|중|하나|총|모두|사이",
    ),
    "th": AnswerWords(
        negation=r"(?:ไม่ใช่|ไม่ได้|มิใช่|ไม่มี|ไม่|ยกเว้น|นอกจาก)",
        negated=r"(?:ไม่ถูกต้อง|ผิด|ไม่ถูก|ไม่ใช่(?:คำตอบ|\s{0,3}$))",
        contrast=r"แต่|ทว่า|หากแต่", either=r"หรือ", ranges=r"ถึง", than=r"กว่า|เมื่อเทียบกับ",
        corrects=r"ไม่(?=$|\s)|เดี๋ยว|รอสักครู่|แก้ไข|จริงๆ แล้ว|จริง ๆ แล้ว|ขอโทษ|ที่จริง",
        reports=r"(?:เคยบอก|คิดว่า|ตอนแรก)",
        unsure=r"ถ้า|หาก|สมมติ", mark=r"(?:คำตอบ|ผลลัพธ์)(?:สุดท้าย|ที่ถูกต้อง)?(?:คือ|:|=|\s)",
        bounds=r"อย่าง(?:น้อย|มาก)|ไม่(?:เกิน|ต่ำกว่า|น้อยกว่า)|(?:มาก|น้อย)กว่า|เกิน|เช่น",
        bounded=r"ขึ้นไป|เป็นอย่าง(?:น้อย|มาก)",
        generic=r"คือ|เป็น|มี|คำตอบ|นี้|นั้น|มัน|อาจ|จะ|บางที|คง|น่าจะ|ประมาณ|ราว|ฉัน|ผม|คิดว่า|ดังนั้น|และ|"
        r"หรือ|ครับ|ค่ะ|ทั้งหมด|"
        r"ก็|ระหว่าง|อยู่|ที่|ได้|คน",
    ),
}  # fmt: skip


class ReadWords:
    """The words of a language, with the English and the Chinese ones, as patterns. Get one with `words_of`."""

    def __init__(self, language: str) -> None:
        locale = locale_of(language)
        signs = str.maketrans(locale.words.signs) if locale else {}
        self.is_spaced = language not in _TOUCHING
        known = {one: _WORDS[one] for one in (language, "en", "zh") if one in _WORDS}

        def words(name: str, *, starts: bool = True, ends: bool = True) -> str:
            """Return the pattern of a field. Words between spaces stand alone, others may touch what is beside them."""
            spaced = [getattr(one, name) for key, one in known.items() if key not in _TOUCHING]
            touching = [getattr(one, name) for key, one in known.items() if key in _TOUCHING]
            alone = _START * starts + rf"(?:{'|'.join(spaced)})" + _END * ends
            return normalized("NFKC", f"(?:{alone}|{'|'.join(touching)})").translate(signs)

        def pattern(form: str) -> re.Pattern[str]:
            return re.compile(form, re.IGNORECASE)

        self.negation = pattern(words("negation", ends=False))
        self.negated = pattern(r"\s{0,2}" + words("negated", starts=False, ends=False))
        self.contrast = pattern(words("contrast"))
        self.corrects = pattern(r"\W{0,4}" + words("corrects", starts=False))
        self.reports = pattern(words("reports"))
        self.unsure = pattern(r"\W{0,4}" + words("unsure", starts=False))
        self.mark = pattern(words("mark", ends=False))
        self.generic = pattern(rf"(?=[^\W\d_]){words('generic')}")
        slot, around = "[\ue000-\ue0ff]", r"[\s$€£:*]*(?:(?:about|around|roughly|some|a total of)\s)?"
        # What bounds a value, or gives it as an example; ">" alone starts a quotation.
        self.bounded = pattern(
            rf"{words('bounds', ends=False)}{around}{slot}"
            rf"|(?:[≥≤≧≦⩾⩽]|(?:(?<=\s)|^)[<>]=?|\\(?:geq?|leq?|gt|lt)\b){around}{slot}"
            rf"|{slot}[\s%°*]{{0,3}}(?:\w{{1,12}}\s)?{words('bounded', starts=False, ends=False)}"
            rf"|{slot}\s?(?:[≥≤≧≦⩾⩽]|\s[<>]=?\s|,\s?\+?(?:∞|\\infty))|(?:∞|\\infty)\s?,\s?{slot}"
            rf"|{slot}\s?(?:±|\+\s?/?\s?[-−]|\\pm\b|\+(?!\s?[\d\ue000-\ue0ff]))"
        )
        self._numbers = {form: number for one in known for form, number in _number_words(one).items()}
        longest = sorted(self._numbers, key=len, reverse=True)
        self._number = pattern(_START + r"(?=[^\W\d_])" + f"(?:{'|'.join(map(re.escape, longest))})" + _END)
        joins = "|".join([known["en"].joins, known["zh"].joins, *([locale.words.joins] if locale else [])])
        listed = "" if language == "ja" else "、|"
        # What parts clauses, each kind in a group of its own.
        self.parts = pattern(
            r"(?P<semicolon>;)|(?P<stop>[。।!?]|\.(?=\s|$)|\.{3,})|(?P<line>\n)"
            rf"|(?P<listed>{listed}\s?[|→⇒]\s?|\s?[-=]>\s?|(?<=[\ue000-\ue0ff])\s?/\s?|\s?/\s?(?=[\ue000-\ue0ff])|\s/\s)"
            r"|(?P<comma>、|(?<!\d),|,(?!\d{3}(?!\d))|:\s?$)|(?P<dash>\s[-–—]{1,2}\s|—)"
            rf"|(?P<either>{words('either')})|(?P<range>{words('ranges')}(?=\s?[\d\ue000-\ue0ff])|~)"
            rf"|(?P<contrast>{words('contrast')})|(?P<than>{words('than')})|(?P<and>{joins})"
        )

    def in_digits(self, text: str) -> str:
        """Return the text with its number words from 13 to 100 in digits; smaller ones often count something else."""
        return self._number.sub(lambda one: str(self._numbers.get(_joined(one[0]), one[0])), text)


@lru_cache(maxsize=32)
def _number_words(language: str) -> dict[str, int]:
    """Return the numbers from 13 to 100 by their words; none where a language has no rules for them."""
    if language not in RbnfEngine.get_supported_languages():
        return {}
    engine, found = RbnfEngine.for_language(language), dict[str, int]()
    for number in range(_FIRST_WORD, 101):
        forms = map(_joined, engine.format_number(number, FormatPurpose.CARDINAL).text_by_ruleset.values())
        found |= {form: number for one in forms for form in (one, one.replace("-", " ")) if not re.search(r"\d", one)}
    return found


def _joined(text: str) -> str:
    return normalized("NFKC", text).replace("\u00ad", "").replace("\u200b", "").casefold()


_FIRST_WORD: Final = 13
_TOUCHING: Final = ("zh", "ja", "th")
"""Languages whose words touch."""
_START: Final = r"(?:(?<![^\W\d_])|(?<=[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]))"
_END: Final = r"(?:(?![^\W\d_])|(?<=[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]))"


@lru_cache(maxsize=32)
def words_of(language: str) -> ReadWords:
    """Return the patterns of a language; of English where it has none."""
    return ReadWords(language if language in _WORDS else "en")
