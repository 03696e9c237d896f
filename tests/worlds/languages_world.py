"""Results and answers that are in no language or the right one, and sentences in a wrong one, as APIs and models write.

Names, places, streets, makers, hotels, dishes and titles are of 32 countries; records are nested, and some have notes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from synthesis.core.records import Language

_DATA = Path(__file__).parents[1] / "data"
NAMES: dict[str, dict[str, list[str]]] = json.loads((_DATA / "names.json").read_text(encoding="utf-8"))
"""People, places, addresses, makers and institutions, hotels and restaurants, dishes, titles of works: by country."""
SENTENCES: dict[Language, list[str]] = json.loads((_DATA / "sentences.json").read_text(encoding="utf-8"))
"""What a model or a service writes of orders, weather, bookings and the like."""
KINDS = ("people", "places", "addresses", "makers", "houses", "dishes", "titles")

NOTES = (
    "Left with neighbour {0}, signature required.",
    "Ask for {0} at the reception of {4}.",
    "Deliver to {2} before noon.",
    "Guest {0} prefers a room on a high floor.",
    "Ships from {1} within 3 business days.",
    "Song by {0}, released in 1977.",
    "{5} is sold out today.",
    "Partly cloudy in {1} with light wind.",
    "out for delivery",
    "Signed by {0}",
    "Meeting with {3} moved to Tuesday.",
    "The book {6} by {0} is available in {1}.",
    "Customer since 2014, VIP",
)
ANSWERS: dict[Language, tuple[str, ...]] = {
    "en": (
        "The order was placed by {0} and ships to {2}.",
        "{0}",
        "{0}, {0b} and {0c}",
        "{6}",
        "- {5}\n- {5b}\n- {5c}",
        "The three best-rated hotels in {1} are:\n\n1. {4} ({2})\n2. {4b}\n3. {4c}\n\nWhich one do you prefer?",
        "{0} works for {3}.",
        "It was written by {0} and is called {6}.",
        "| Name | City |\n|---|---|\n| {0} | {1} |",
        "**{6}** by {0}\n**{6b}** by {0b}\n**{6c}** by {0c}",
        "You can reach {3} at {2}; ask for {0}.",
    ),
    "zh": (
        "订单由 {0} 提交，将送往 {2}。",
        "答案：{0}",
        "推荐的酒店有：\n- {4}\n- {4b}\n- {4c}",
        "作者是 {0}，书名是《{6}》。",
        "{1}",
        "{0}、{0b}、{0c}",
        "这首歌叫 {6}，演唱者是 {0}。",
        "该公司是 {3}，地址：{2}",
    ),
    "ja": (
        "ご注文者は {0} 様で、配送先は {2} です。",
        "おすすめのホテルは {4} と {4b} です。",
        "{0}",
        "作品名は {6}、作者は {0} です。",
        "- {6}\n- {6b}\n- {6c}",
    ),
    "ko": ("주문자는 {0}이고 배송지는 {2}입니다.", "추천 호텔은 {4}입니다.", "{0}, {0b}", "작품 제목은 {6}입니다."),
    "ar": ("تم تقديم الطلب بواسطة {0} وسيتم شحنه إلى {2}.", "الفندق هو {4} في {1}.", "{0}", "مؤلف الكتاب {6} هو {0}."),
    "hi": ("यह ऑर्डर {0} ने दिया है और {2} पर भेजा जाएगा।", "होटल का नाम {4} है।", "{0}", "इस गीत का नाम {6} है।"),
    "ru": ("Заказ оформил {0}, адрес доставки: {2}.", "Лучшая гостиница в городе: {4}.", "{0}"),
    "es": ("El pedido lo hizo {0} y se envía a {2}.", "El hotel se llama {4} y está en {1}.", "{0}, {0b}"),
}


def _fields(rng: random.Random) -> dict[str, str]:
    found = {}
    for number, kind in enumerate(KINDS):
        for suffix in ("", "b", "c"):
            found[f"{number}{suffix}"] = rng.choice(NAMES[rng.choice(list(NAMES))][kind])
    return found


def _filled(text: str, fields: dict[str, str]) -> str:
    for name, value in fields.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def _record(rng: random.Random, *, notes: bool) -> Any:
    def one(kind: str) -> str:
        return rng.choice(NAMES[rng.choice(list(NAMES))][kind])

    def some(kind: str, most: int = 6) -> list[str]:
        return [one(kind) for _ in range(rng.randint(2, most))]

    home = NAMES[rng.choice(list(NAMES))]
    note = _filled(rng.choice(NOTES), _fields(rng)) if notes else ""
    number = rng.randint(100, 99_999)
    forms: tuple[Any, ...] = (
        {
            "order_id": f"A-{number}",
            "customer": one("people"),
            "status": rng.choice(("shipped", "on hold")),
            "note": note,
        },
        {"city": one("places"), "weather": "sunny", "temperature_c": 21.5, "station": one("places")},
        home["people"],
        some("people", 12),
        {"results": some("titles"), "total": number},
        {
            "menu": [{"dish": one("dishes"), "price": 12.5, "currency": "EUR"} for _ in range(4)],
            "restaurant": one("houses"),
        },
        {"playlist": [{"title": one("titles"), "artist": one("people"), "seconds": 201} for _ in range(4)]},
        {"hotel": {"name": one("houses"), "address": one("addresses"), "manager": {"name": one("people")}}, "stars": 4},
        {
            "sender": {"company": one("makers"), "address": one("addresses")},
            "tracking": f"RX{number}DE",
            "events": [note, "in transit"],
        },
        {"employees": [{"name": name, "office": home["places"][0]} for name in home["people"]]},
        {"books": home["titles"], "publisher": one("makers")},
        {"dishes": home["dishes"], "open": True},
        {"page": json.dumps({"hits": [one("houses"), one("makers")], "note": note}, ensure_ascii=False)},
        {"contacts": ", ".join(some("people")), "city": one("places")},
        {"addresses": "; ".join(some("addresses", 4))},
        [{"id": number, "label": one(kind)} for kind in KINDS],
        {"text": note},
        one("people"),
        {"stops": some("places", 10)},
        {"product": f"{one('makers')} X-{number} Pro, 256 GB", "sku": f"{number}-BLK", "brand": one("makers")},
    )
    return rng.choice(forms)


def right_texts(count: int) -> Iterator[tuple[str, Language]]:
    """Yield results and final answers with the language of their conversation: nothing in them is in a wrong one."""
    for number in range(count):
        rng = random.Random(f"right {number}")
        if number % 2:
            language: Language = rng.choice(("en", "en", "en", "zh", "ja", "ko", "ar", "hi", "ru", "es"))
            yield _filled(rng.choice(ANSWERS[language]), _fields(rng)), language
        else:
            language = rng.choice(("en", "en", "zh"))
            yield json.dumps(_record(rng, notes=language == "en"), ensure_ascii=rng.random() < 0.5), language


def wrong_texts() -> Iterator[tuple[str, Language, Language]]:
    """Yield texts with a sentence in a wrong language, the language wanted and that of the sentence."""
    for wrong, sentences in SENTENCES.items():
        for wanted in ("en", "zh", "de", "ar"):
            if wanted == wrong:
                continue
            rng = random.Random(f"wrong {wrong} {wanted}")
            for sentence in sentences:
                yield sentence, wanted, wrong
                records = (
                    {"id": 7, "message": sentence},
                    {"data": [{"name": "Oslo"}, {"notes": ["OK", sentence]}]},
                    [sentence],
                )
                yield json.dumps(rng.choice(records), ensure_ascii=rng.random() < 0.5), wanted, wrong
            yield " ".join(sentences), wanted, wrong
            yield "\n\n".join(sentences), wanted, wrong
            yield f"{_filled('{0}, {2}', _fields(rng))}\n\n" + " ".join(sentences[:3]), wanted, wrong
