"""Words by which a sentence of a language differs from a name, a title or an address in it.

They are pronouns, auxiliaries, negations, conjunctions and question words, by ISO 639-1 code. A hyphen stands before an
ending of words, in languages that express the same by endings.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Final

from synthesis.core.records import Language

_CLAUSE_WORDS: Final[Mapping[Language, str]] = {
    "af": "is nie het jy jou dit wat word sal kan moet hulle ons hy asseblief was",
    "ar": "هذا هذه التي الذي الذين تم لا لم لن هو هي كان كانت إلى أن إن قد يتم يرجى ما هل كم هناك يمكن يمكنك ليس "
    "سيتم كيف متى",
    "az": "bu deyil var ola olan olub edir edin edildi bilər ki sizin siz necə nədir -dır -dir -dur -dür -acaq "
    "-əcək -lib -lıb",
    "be": "не ёсць гэта што які якая як калі вы ваш вам быў была было былі будзе можна трэба каб ці толькі няма "
    "можа -ецца",
    "bg": "е са не се да ще беше бяха има няма това този тази който която което как ако кога вие ви може моля че ли "
    "си съм",
    "bn": "হয় হয়েছে হবে না নেই আছে ছিল করুন করা করতে করে আপনি আপনার এটি যে যদি কি কত কোন আমি -েছে -ছেন -যাবে",
    "bs": "je su nije nisu biti bio bila bilo će ste smo sam se ne da koji koja koje što kako ako ali može možete "
    "vaš vaša",
    "ca": "és són era ha han que es pot us està estan serà vostè aquest aquesta si perquè hi ho molt té cal quin "
    "quina s",
    "cs": "je jsou nebyl nebyla nebylo není byl byla bylo byly být bude budou se si že který která které jak "
    "pokud jste jsem máte vaše "
    "aby ale lze",
    "cy": "mae ydy yw oedd bydd wedi nid eich chi gallwch hwn hyn os pan roedd fod ddim beth faint",
    "da": "er var bliver blev har kan skal vil ikke du din dit jeg det som hvis når hvad hvor hvordan vi være været "
    "koster ligger",
    "de": "ist sind war waren wird werden wurde wurden hat haben kann können muss nicht kein keine sie ich wir ihr "
    "ihre ihren es dass wenn wie viele sich auch noch bitte Sie Ihr Ihre Ihren Ihnen diese dieser dieses "
    "liegt liegen lag lagen stieg sank beträgt betrug kostet dauert heißt gehört gehören gilt gibt steht bleibt kommt "
    "beginnt endet enthält fährt "
    "erfolgt öffnet schließt läuft findet",
    "el": "είναι ήταν δεν μην να θα που πως αν έχει έχουν έχετε μπορείτε μπορεί σας σου μου αυτό αυτή τι πού πώς "
    "όταν πρέπει",
    "en": "is are was were be been has have had does will would can could should must not you your it its they "
    "their we our he she his her this that these which who what when where how if because please there",
    "es": "es son está están fue fueron ha han será que se su sus lo le les más muy este esta estos si cuando cómo "
    "qué cuál dónde puede pueden tiene tienen hay usted nos mi me tu ya porque favor era sido ser dura "
    "empieza mide",
    "et": "on ei see mis kes kui oli olid olla saab te teie seda pole palun selle oma aga et mitu kuidas ole",
    "eu": "da dira du ditu dut ez zen ziren izan egin behar dago daude duen dela zure hau dute daiteke zein dituzu "
    "duzu",
    "fa": "است هست نیست بود شد شده می را این که آن شما چه چگونه اگر کنید کند دارد نمی خواهد باید لطفا چند",
    "fi": "on ei ovat oli olivat olla se hän joka mikä mitä kun jos että mutta voi voit voidaan ole sinun tämä "
    "tämän nyt miten kuinka -taan -tään -tiin -vat -vät -nut -nyt -tava",
    "fr": "est sont était été ont avez sera seront que qui qu vous votre vos nous notre il elle ils elles ne pas "
    "cette ce ces se je tu si quand comment où quel quelle quelles peut peuvent avoir être suis coûte dure "
    "commence",
    "ga": "tá níl bhí atá raibh beidh sé sí siad mé tú cad conas nach ní féidir leat má gur is",
    "gl": "é son está están foi ten teñen hai non que se seu súa este esta pode poden vostede cando como máis moi "
    "ser sido cal",
    "gu": "છે છો હતું હતો હતી નથી તમે તમારા તમારું તમારી શું કેટલી કરો થશે થયું જો હોય શકે કે આ",
    "he": "הוא היא זה זו לא אין יש אני אתה אתם אנחנו הם את אם כי איך מה איפה מתי ניתן היה הייתה יהיה צריך שלך אנא "
    "האם כדי",
    "hi": "है हैं था थी थे हो होगा होगी होती नहीं को ने कर करें क्या कितनी आप आपका आपके यह यदि गया गई कृपया",
    "hr": "je su nije nisu biti bio bila bilo će ste smo sam se ne koji koja koje što kako ako ali može možete vaš "
    "vaša",
    "hu": "nem hogy vagy lesz volt voltak van kell lehet ezt azt aki ami még csak kérjük már mert nincs vannak hány "
    "mennyi hogyan ez -ható -hető -tja -ja -ött -tük -tunk",
    "hy": "է են չէ էր եք եմ որ դուք ձեր այս այդ ինչ ինչպես եթե պետք կարող չի կա",
    "id": "adalah yang tidak ini itu akan telah sudah dapat bisa anda saya kami apa berapa bagaimana jika karena "
    "sedang harus ada belum berada "
    "terletak dimulai",
    "is": "er eru var voru ekki að sem það þú þér ég hefur hafa verður vera getur ef þegar hvað hver hvernig þetta "
    "hann hún",
    "it": "è sono era ha hanno stato stata sarà che non si ci suo sua questo questa questi se quando quale quali "
    "dove perché può possono più molto essere deve mi dura inizia",
    "ja": "です ます でした ました ません ください でしょう する した される された ている ない を は だった "
    "しました されました します されます ですか である",
    "ka": "არის არ ვერ ეს ის რომ თქვენ თქვენი როგორ რა თუ იყო იქნება უნდა აქვს შეიძლება -ულია -დება",
    "kk": "емес бар жоқ бұл осы қалай қайда сіз сіздің болды болады керек мүмкін қанша -ады -еді -ылды -ілді -ды "
    "-ді",
    "km": "គឺ មិន បាន នឹង ដែល មាន សូម អ្នក នេះ",
    "kn": "ಇದೆ ಇಲ್ಲ ನೀವು ನಿಮ್ಮ ಈ ಏನು ಹೇಗೆ ಎಷ್ಟು ಎಂದು ಮಾಡಿ ಅಲ್ಲ -ಿದೆ -ತ್ತದೆ -ಿಲ್ಲ -ಗಿದೆ",
    "ko": "-니다 -어요 -아요 -해요 -세요 -까요 -니까 -나요 -네요 -예요 -에요 -십시오 -했다 -된다 -한다 -있다 -없다 "
    "-였다 -았다 -었다 -를",
    "ky": "эмес бар жок бул кантип сиз сиздин болду болот керек мүмкүн канча -ат -ет -ылды -илди -ган -ды",
    "lo": "ແມ່ນ ບໍ່ ໄດ້ ຈະ ແລ້ວ ທີ່ ກະລຸນາ ທ່ານ",
    "lt": "yra nėra buvo bus kad ar kaip kur kas jūs jūsų jis ji tai šis ši šio gali galite reikia kurie kuris jei "
    "kai jau kiek",
    "lv": "ir nav bija būs ka vai kā kas jūs jūsu viņš šis šī šo var kurš kura kad mēs tiek lūdzu nevar tika cik",
    "mk": "е се не ќе беше има нема ова овој оваа кој која што како ако кога вие ви може можете дека ли да сум сте",
    "ml": "ആണ് ഇല്ല നിങ്ങൾ നിങ്ങളുടെ ഈ എന്ത് എങ്ങനെ എത്ര എന്ന് ഉണ്ട് അല്ല -ുന്നു -ില്ല -്ല -ാണ് -ിക്കുക -ുണ്ട് -ാം "
    "-ട്ടു",
    "mn": "юм бол байна байсан вэ үү уу биш ямар таны та энэ тэр хэд -сан -сэн -сон -сөн",
    "mr": "आहे आहेत नाही होते होता केले झाले करा तुम्ही तुमचे हे ही का किती जर आणि",
    "ms": "ialah adalah yang tidak ini itu akan telah sudah boleh anda saya kami apa berapa jika kerana sedang "
    "perlu ada belum",
    "my": "သည် ပါ မည် တယ် ခဲ့ သော",
    "ne": "छ छन् हो थियो हुन्छ भएको छैन गर्नुहोस् तपाईं तपाईंको यो को कति के यदि गर्न गरिएको गरेको सक्छ",
    "nl": "is zijn waren wordt worden werd heeft hebben kan kunnen moet niet geen uw je jij ik wij we hij zij wie "
    "wat waar hoe als deze dit er ook zal hoeveel ligt duurt begint",
    "no": "er var ble blir har kan skal vil ikke du din ditt jeg det som hvis når hva hvor hvordan vi være vært må "
    "koster ligger",
    "pa": "ਹੈ ਹਨ ਸੀ ਨਹੀਂ ਨੂੰ ਨੇ ਕਿ ਤੁਸੀਂ ਤੁਹਾਡੇ ਤੁਹਾਡਾ ਇਹ ਉਹ ਕੀ ਕਰੋ ਗਿਆ ਗਈ ਹੋ ਜੇ ਕਿੰਨੀ",
    "pl": "jest są był była było były być będzie będą nie się że który która które jak czy jeśli gdy mają może "
    "można proszę twój ale tego jego już został została zostało zostały ile kosztuje trwa "
    "zaczyna wynosi znajduje",
    "ps": "دی ده دي نه چې تاسو ستاسو دا هغه شي شوی کړئ کولی څو",
    "pt": "é são está estão foi foram será tem têm há não que se seu sua seus suas você ele ela isso este esta esse "
    "quando qual quais onde porque pode podem mais muito ser sido já favor "
    "fica ficam custa dura começa chega",
    "ro": "este sunt era fost nu că se care ce cum dacă când unde poate pot trebuie acest această vă ați îl am mai "
    "foarte câți costă durează începe află",
    "ru": "не это что который которая которые как если вы ваш ваша ваше вам был была было были будет будут есть нет "
    "можно нужно я он она мы они чтобы потому поэтому уже только пожалуйста ли где когда сколько каково какая "
    "какой стоит составляет найден найдена найдено найдены отменен отменён отменена создан создана закрыт открыт "
    "готов отправлен -ется -ются -ится -ться",
    "si": "ඇත නැත ඔබ ඔබේ ඔබගේ මෙම මේ එය කුමක්ද කීයද වේ විය කරන්න හැක හැකි නොහැක විට ඇති",
    "sk": "je sú nie bol bola bolo boli byť bude budú sa si že ktorý ktorá ktoré ako ak keď ste som máte vaše aby "
    "ale môže",
    "sl": "je so ni niso bil bila bilo biti bo bodo se da ki kako če ko ste sem smo lahko vaš vaša ali mora kaj",
    "sq": "është janë ishte nuk që ka kanë mund duhet ju juaj ky kjo kur jeni sa të",
    "sr": "je su nije nisu biti bio bila bilo će ste smo sam se ne koji koja koje što kako ako ali može možete vaš "
    "vaša је су није нису бити био била било ће сте смо сам се не да који која које што како ако али може "
    "можете ваш ваша",
    "sv": "är var blev blir har kan ska vill inte du din ditt jag det som att om när vad hur vi vara varit måste ni "
    "kostar ligger börjar",
    "sw": "ni hii hiyo hilo ambayo ambao kwamba wewe yako yangu lakini je nini wapi tafadhali ana una ina wana kuna "
    "ngapi hakuna",
    "ta": "இல்லை உள்ளது என்ன எப்படி நீங்கள் உங்கள் இந்த என்று வேண்டும் முடியும் ஆகும் எவ்வளவு -கிறது -ன்றன -ட்டது "
    "-வில்லை -ீர்களா -ள்ளது -வும் -ந்தது",
    "te": "ఉంది లేదు మీరు మీ ఈ ఏమి ఎలా ఎంత అని కావాలి కాదు ఉన్నాయి -ంది -ాయి -ండి -లేదు",
    "th": "ฉัน ขออภัย เรา ไม่พบ ขอบคุณ เป็น คือ ไม่ ได้ จะ ครับ ค่ะ แล้ว กรุณา โปรด ที่ ของคุณ เท่าไร ให้ ต้อง "
    "ถูก เกินไป ว่า จาก เมื่อ เพื่อ โดย "
    "ไว้ อยู่ นี้ ซึ่ง หาก มี ใช้ เริ่ม ประมาณ ภายใน กำลัง สามารถ ทั้งหมด ถ้า เพราะ มาถึง "
    "เปิดให้ ปิดให้ เปิดเวลา ปิดเวลา ปิดวัน เปิดวัน ทุกวัน ยกเลิก สำเร็จ",
    "tl": "ay ito iyon ako ikaw siya kami kayo sila mo ko niya kapag dahil nang po ba mayroon wala maaari ilan",
    "tr": "bu değil var yok mı mi mu mü nasıl nerede kaç nedir olan olarak oldu olacak ama çünkü eğer lütfen sizin "
    "-iyor -ıyor -uyor -üyor -dır -dir -dur -dür -tır -tir -tur -tür -acak -ecek -ildi -ıldı -uldu -üldü -ndi "
    "-ndı -ndu -ndü -iniz -ınız -madı -medi -malı -meli",
    "uk": "не це що який яка які як якщо ви ваш ваша ваше вам був була було були буде будуть є немає можна потрібно "
    "я він вона ми вони щоб вже уже бо тож тільки чи де коли скільки -ється -ються -ться -тися",
    "ur": "ہے ہیں تھا تھی تھے نہیں کہ کو نے آپ یہ وہ کیا کریں گا گی گے ہو ہوا گیا کر",
    "uz": "bu emas bor yo siz sizning kerak mumkin edi necha qanday bo -adi -moqda -langan -ildi -ing",
    "vi": "là không được đã sẽ đang bạn tôi nếu hãy bị thì mà rằng nhiêu có nằm gồm đạt khoảng "
    "đây vào",
    "zh": "的 是 了 吗 呢 请 您 你 我 这 那 什么 多少 哪 怎 将 已 没有 可以 需要 如果 因为 位于 返回 被 把 也 用于 "
    "预计 不是 不能 无法 正在 嗎 請 這 什麼 將 沒有 無法 為了 因為 位於",
}  # fmt: skip
_ENGLISH: Final = frozenset(("the", "of", "to", "with", "by", "from", "and", "for", "in"))
"""Words that English sentences have, and English names too."""
_SHORT_WORDS: Final[Mapping[Language, str]] = {
    "af": "in by die van en",
    "ca": "el la els les un una de a en per i o",
    "cs": "to by i a o od po na",
    "da": "for i en et den det af at på med og",
    "de": "in der die das den dem ein eine um an am im zu mit und",
    "es": "el la los las un una de a en por y o",
    "fi": "ja on",
    "fr": "le la les un une des du de en et sur",
    "gl": "o a os as un unha de do da en no na por e",
    "id": "di ke dan",
    "it": "il lo la i gli le un una in di da su per con a e ci si",
    "nl": "in de het een van op te met en om",
    "no": "for i en et den det av på med og",
    "pl": "to by i a o od do na w z",
    "pt": "o a os as um uma de do da em no na por e",
    "ro": "in un o la cu pe de si din",
    "sk": "to by i a o od do na",
    "sl": "in na od do za",
    "sv": "for i en ett den det av på med och",
    "tr": "ve bir de da",
}
"""Articles, prepositions and conjunctions: Italian "il" is a pronoun in French, German "in" is English too."""


def clause_words_in(sentence: str, words: Sequence[str], languages: Collection[Language]) -> set[str]:
    """Return the words and endings of clauses in some languages that a sentence has.

    Args:
        words: words of the sentence. Empty in scripts without spaces, in which the sentence is searched.
        languages: one language, and those that cannot be distinguished from it in a short text.
    """
    whole, endings = _clause_words(frozenset(languages))
    if not words:
        return {one for one in whole if one in sentence}
    present = {word for word in words if word in whole or (word.endswith(endings) and word not in endings)}
    return present | ({words[0].lower()} & whole)


def own_words_in(sentence: str, words: Sequence[str], languages: Collection[Language]) -> set[str]:
    """Return the words that speak for a sentence being in one of some languages, though names may have them too."""
    found = clause_words_in(sentence, words, languages)
    return found | _ENGLISH.intersection(words) if "en" in languages else found


@cache
def words_of_both(found: frozenset[Language], wanted: frozenset[Language]) -> frozenset[str]:
    """Return the short words of some languages that do not speak for others, though sentences of those have them."""
    short = {word for one in found - wanted for word in _SHORT_WORDS.get(one, "").split()}
    return frozenset(short | {word.capitalize() for word in short})


@cache
def _clause_words(languages: frozenset[Language]) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the words of clauses of some languages: whole words, and endings of words."""
    every = [word for language in languages for word in _CLAUSE_WORDS[language].split()]
    return frozenset(one for one in every if one[0] != "-"), tuple(one[1:] for one in every if one[0] == "-")
