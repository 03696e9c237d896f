"""Letters and words beside a name: what may touch it within its word, and what makes another name of it.

All are parts of regular expressions for `locale_words`, in normal form NFKC once they are compiled.
"""

from __future__ import annotations

from typing import Final

KOREAN_PARTICLES: Final = (
    "은|는|이|가|을|를|의|에|에서|에게|에게서|로|으로|로서|으로서|와|과|도|만|부터|까지|보다|처럼|이나|나|이랑|랑|"
    "하고|라고|이라고|"
    "라는|이라는|라며|이라며|께서|한테|마다|조차|밖에|뿐|야|이야|씨|님|입니다|이다|이에요|예요|이었습니다|였습니다|"
    "이며|이고|고|며|"
    "이었다|였다|이었고|였고|이었으며|였으며|이자|인|인데|인데요|이었던|였던|이죠|죠|이지요|지요|입니까|이라|라|"
    "이라서|라서|이므로|"
    "였어요|이었어요|였어|이었어|이랍니다|랍니다|거든요|이거든요|시|군|구|광역시|특별시|특별자치시|특별자치도|"
    "이지만|지만|이네요|네요|이군요|군요|요|이란|란|이라면|라면|일|임"
)
JAPANESE_PARTICLES: Final = (
    "は|が|を|に|で|の|と|も|へ|や|か|だ|だった|です|でした|でしょう|である|であり|だと|なの|なので|など|から|まで|"
    "より|という|といい|"
    "といった|として|って|にて|にある|さん|氏|様|先生|君|市|都|府|県|州|以|ほど|だけ|ぐらい|くらい|ならびに|および|"
    "及び|並びに"
)
THAI_BEFORE: Final = (
    "คือ|เป็น|ชื่อ|ที่|ใน|ของ|จาก|และ|หรือ|ถึง|ว่า|ได้แก่|กับ|เมือง|เมืองหลวง|กรุง|นคร|ประเทศ|จังหวัด|รัฐ|เกาะ|แม่น้ำ|ภูเขา|คุณ|นาย|นาง|"
    "นางสาว|"
    "ดร\\.|โดย|อยู่|ไป|มา|ไปยัง|ยัง|สู่|ระหว่าง|เช่น|เลือก|ตอบ|ใช้|ภาษา|สกุล|เงิน|สี|วัน|เดือน|ธาตุ|บริษัท|แต่|ส่วน|คำตอบ|ให้|ต่อ|พบ|ต้อง|มี|"
    "แก่|แห่ง|"
    "เขต|อำเภอ|ตำบล|ทวีป|เรียก|แล้ว|สนามบิน|ก็"
)
THAI_AFTER: Final = (
    "ครับ|ค่ะ|คะ|นะ|และ|หรือ|เป็น|คือ|มี|ซึ่ง|ใน|ที่|ของ|จะ|อยู่|ได้|ก็|กับ|แต่|โดย|จาก|ถึง|ไป|มา|ตั้ง|เมื่อ|ว่า|นั้น|นี้|แล้ว|เพราะ|ไม่|ถือ|เคย|ยัง|"
    "ต่อ|ให้|เท่า|สำหรับ|ด้วย|รวม|ทั้ง|ประมาณ|กำลัง|ต้อง|เกิด|เขียน|แห่ง|เอง|ตาม|ทาง|ประเทศ|เมือง|ๆ|ฯ|มหานคร|พูด|ใช้|ชื่อ|ออก|เริ่ม|จึง|"
    "หลัง|ก่อน|"
    "คน|เดิน|สร้าง|ผลิต|ชนะ|สูง|ใหญ่"
)
TURKISH_CASES: Final = (
    "d[ıiuü]r|t[ıiuü]r|d[ae]|t[ae]|d[ae]n|t[ae]n|d[ae]ki|t[ae]ki|n?[ıiuü]n|y?[ıiuü]|y?[ae]|yl[ae]|l[ae]|"
    "d[ae]d[ıiuü]r|t[ae]d[ıiuü]r|yd[ıiuü]|d[ıiuü]|t[ıiuü]|s[ıiuü]d[ıiuü]r|s[ıiuü]"
)
FINNISH_CASES: Final = (
    "(?:n|a|ta|ssa|sta|an|en|in|on|un|yn|seen|lla|lta|lle|na|ksi|tta|ja|iin|oon|uun|hin|hon|han)"
    "(?:kin|ko|han|kaan)?|kin|ko"
)
RUSSIAN_CASES: Final = "а|у|ом|ем|е|ы|и|ов|ам|ами|ах"

LONGER_BEFORE: Final = (
    "Nuev[ao]|Nov[ao]|Nuov[ao]|Nouvelle|Nouveau|Neue?|Papúa|(?:Нов|Южн|Северн|Западн|Восточн|Экваториальн)[а-я]{1,3}|Папуа|"
    "Güney|Kuzey|Yeni|Ekvator|Doğu|Batı|Uusi|दक्षिणी?|उत्तरी?|पश्चिमी?|पूर्वी?|नई|नया|न्यू|नॉर्थ|साउथ|جنوب|غينيا"
)
"""Pattern of words that make another name of the name behind them, in all languages but English."""
LONGER_AFTER: Final = (
    "(?:del|do|du|della|de la) (?:Norte|Sur|Sul|Nord|Sud|Este|Leste|Est|Oeste|Ovest|Ouest)|Ecuatorial|Equatorial|"
    "[Ee]quatoriale|"
    "الجنوبية|الشمالية|الاستوائية|الجديدة|بيساو|Moi|Nova|Nueva|Nuova|Ocidental|Occidental|occidental|occidentale"
)
"""Pattern of words that make another name of the name before them."""
