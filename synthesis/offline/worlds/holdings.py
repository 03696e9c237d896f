"""Worlds in which things are kept and passed on: a library, to-do lists, a warehouse."""

from __future__ import annotations

import random
from typing import Any

from synthesis.core.records import Rows
from synthesis.offline.worlds.descriptions import (
    Act,
    Added,
    ColumnText,
    Has,
    Look,
    Pick,
    TableText,
    TaskText,
    ToolText,
    WorldText,
    a_day,
    finder,
    fixed,
    lister,
    mover,
    named,
    number,
    one_of,
    refers,
)


def _count(rows: Rows, table: str, **wanted: Any) -> int:
    return sum(all(row[name] == value for name, value in wanted.items()) for row in rows[table].values())


_BOOKS = (
    "The Salt Road", "A House of Glass", "Northern Lights Over Oslo", "The Last Ferry", "Maps of Silence",
    "The Clockmaker's Debt", "Winter Orchard", "Letters From Porto", "The Iron Garden", "Seven Quiet Rivers",
    "An Ordinary Storm", "The Paper Lantern",
)  # fmt: skip


def _lent(rows: Rows, rng: random.Random) -> None:
    """Nobody has a book twice; of each book there are some copies more than are lent."""
    pairs = [(member, book) for member in rows["members"] for book in rows["books"]]
    for row, (member, book) in zip(rows["loans"].values(), rng.sample(pairs, len(rows["loans"])), strict=True):
        row["member"], row["book"] = member, book
    for id, held in rows["books"].items():
        held["copies"] = _count(rows, "loans", book=id) + rng.randint(1, 3)


LIBRARY = WorldText(
    name="library loans",
    tables={
        "members": TableText("M", 8, {"name": named()}),
        "books": TableText("B", 7, {"title": named(_BOOKS), "copies": number(1, 1)}),
        "loans": TableText(
            "L",
            9,
            {
                "member": refers("members"),
                "book": refers("books"),
                "due": ColumnText("string", a_day),
                "status": fixed("out"),
            },
        ),
    },
    settle=_lent,
    tools=(
        finder("find_member", "members", "name", "member"),
        finder("find_book", "books", "title", "book"),
        lister("loans_of_member", "loans", "member", "members", "loan", "member"),
        ToolText(
            "lend_book",
            "Lend a copy of a book. Refused where no copy is left, or the member has it, or 5 books, already.",
            {
                "member_id": "Id of the member.",
                "book_id": "Id of the book.",
                "due": "Day on which it is due, as 2026-01-31.",
            },
            """
            row("members", member_id)
            copies = row("books", book_id)["copies"]
            own = every("loans", member=member_id, status="out")
            require(len(own) < 5, f"member {member_id} has 5 books already")
            require(all(one["book"] != book_id for one in own), f"member {member_id} has it already")
            require(len(every("loans", book=book_id, status="out")) < copies, f"no copy of {book_id} is left")
            return add("loans", "L", member=member_id, book=book_id, due=day(due), status="out")
            """,
        ),
        mover(
            "return_loan",
            "Record that the book of a loan is back.",
            "loan",
            "out",
            "returned",
            "the book of loan {loan_id} is back already",
        ),
        ToolText(
            "renew_loan",
            "Give a loan a later due day. Refused where the day is not later, or the book is back.",
            {"loan_id": "Id of the loan.", "due": "The new due day, as 2026-01-31."},
            """
            loan = row("loans", loan_id)
            require(loan["status"] == "out", f"the book of loan {loan_id} is back already")
            require(day(due) > loan["due"], f"loan {loan_id} is due on {loan['due']}; the new day must be later")
            loan["due"] = due
            return {"id": loan_id, **loan}
            """,
        ),
    ),
    invariants={
        "no more copies are out than there are": (
            "all(len(every('loans', book=id, status='out')) <= one['copies'] for id, one in STATE['books'].items())"
        ),
        "nobody has more than 5 books": (
            "all(len(every('loans', member=id, status='out')) <= 5 for id in STATE['members'])"
        ),
    },
    tasks=(
        TaskText(
            (
                '{loan.member.name} has brought back "{loan.book.title}". Please check it in.',
                'Please record the return of "{loan.book.title}", which {loan.member.name} had borrowed.',
            ),
            {"loan": Pick("loans")},
            (
                Look("find_member", {"name": "{loan.member.name}"}, "{loan.member.id}"),
                Look("loans_of_member", {"member_id": "{loan.member.id}"}, "{loan.id}"),
                Act("return_loan", {"loan_id": "{loan.id}"}, Has("loans", "{loan.id}", {"status": "returned"})),
            ),
        ),
        TaskText(
            (
                '{member.name} would like to borrow "{book.title}", due on {day}. Please lend it.',
                'Lend "{book.title}" to {member.name} until {day}, please.',
            ),
            {"member": Pick("members"), "book": Pick("books"), "day": lambda rng: f"2026-04-{rng.randint(10, 28)}"},
            (
                Look("find_member", {"name": "{member.name}"}, "{member.id}"),
                Look("find_book", {"title": "{book.title}"}, "{book.id}"),
                Act(
                    "lend_book",
                    {"member_id": "{member.id}", "book_id": "{book.id}", "due": "{day}"},
                    Added("loans", {"member": "{member.id}", "book": "{book.id}", "due": "{day}", "status": "out"}),
                ),
            ),
            holds=lambda picked: (
                _count(picked["book"].rows, "loans", member=picked["member"].id) < 5
                and not _count(picked["book"].rows, "loans", member=picked["member"].id, book=picked["book"].id)
            ),
        ),
        TaskText(
            (
                '{loan.member.name} needs "{loan.book.title}" for longer. Please renew it until {day}.',
                'Could the loan of "{loan.book.title}" to {loan.member.name} run until {day}? Please see to it.',
            ),
            {"loan": Pick("loans"), "day": lambda rng: f"2026-04-{rng.randint(10, 28)}"},
            (
                Look("find_member", {"name": "{loan.member.name}"}, "{loan.member.id}"),
                Look("loans_of_member", {"member_id": "{loan.member.id}"}, "{loan.id}"),
                Act(
                    "renew_loan",
                    {"loan_id": "{loan.id}", "due": "{day}"},
                    Has("loans", "{loan.id}", {"due": "{day}", "status": "out"}),
                ),
            ),
        ),
    ),
)

_LISTS = (
    "Garden", "Kitchen", "Move House", "Office", "School Fair", "Tax Papers", "Winter Trip", "Attic", "Birthday Party",
    "Bike Repair", "Choir", "Dentist", "Errands", "Family Album", "Guest Room", "Workshop",
)  # fmt: skip
_CHORES = (
    "Order compost", "Sharpen the knives", "Label the boxes", "Renew the lease", "Print the flyers", "Scan receipts",
    "Wax the skis", "Prune the roses", "Descale the kettle", "Cancel the gas contract", "Book the projector",
    "Borrow a tent", "Sort the invoices", "Water the ferns", "Replace the lamp", "Pack the china",
)  # fmt: skip
_NEW_CHORES = ("Call the plumber", "Buy batteries", "Return the keys", "Fix the fence", "Write the minutes")

TODO = WorldText(
    name="to-do lists",
    tables={
        "lists": TableText("G", 4, {"name": named(_LISTS)}),
        "items": TableText(
            "I",
            11,
            {
                "title": named(_CHORES),
                "list": refers("lists"),
                "priority": one_of("low", "medium", "high"),
                "done": fixed(False),
            },
        ),
    },
    tools=(
        finder("find_list", "lists", "name", "list"),
        finder("find_item", "items", "title", "item"),
        lister("items_in_list", "items", "list", "lists", "item", "list"),
        ToolText(
            "add_item",
            "Put a new item on a list. Refused where an item of this title is there already.",
            {"list_id": "Id of the list.", "title": "What is to be done.", "priority": "low, medium or high."},
            """
            row("lists", list_id)
            require(priority in ("low", "medium", "high"), "the priority is low, medium or high")
            require(not every("items", title=text(title)), f"there is an item {title!r} already")
            return add("items", "I", title=text(title), list=list_id, priority=priority, done=False)
            """,
        ),
        ToolText(
            "complete_item",
            "Tick an item off.",
            {"item_id": "Id of the item."},
            """
            item = row("items", item_id)
            require(not item["done"], f"item {item_id} is done already")
            item["done"] = True
            return {"id": item_id, **item}
            """,
        ),
        ToolText(
            "move_item",
            "Move an item that is not done to another list.",
            {"item_id": "Id of the item.", "list_id": "Id of the list it goes to."},
            """
            item = row("items", item_id)
            row("lists", list_id)
            require(not item["done"], f"item {item_id} is done already")
            require(item["list"] != list_id, f"item {item_id} is on that list already")
            item["list"] = list_id
            return {"id": item_id, **item}
            """,
        ),
    ),
    invariants={
        "no two items have one title": (
            "len({one['title'] for one in STATE['items'].values()}) == len(STATE['items'])"
        ),
        "priorities are known": (
            "all(one['priority'] in ('low', 'medium', 'high') for one in STATE['items'].values())"
        ),
    },
    tasks=(
        TaskText(
            (
                'I have done "{item.title}". Please tick it off.',
                'Please mark "{item.title}" as done on my list.',
            ),
            {"item": Pick("items")},
            (
                Look("find_item", {"title": "{item.title}"}, "{item.id}"),
                Act("complete_item", {"item_id": "{item.id}"}, Has("items", "{item.id}", {"done": True})),
            ),
        ),
        TaskText(
            (
                'Please put "{title}" on my {list.name} list, priority {priority}.',
                'Add to the list {list.name}: "{title}". It has {priority} priority.',
            ),
            {
                "list": Pick("lists"),
                "title": lambda rng: rng.choice(_NEW_CHORES),
                "priority": lambda rng: rng.choice(("low", "medium", "high")),
            },
            (
                Look("find_list", {"name": "{list.name}"}, "{list.id}"),
                Act(
                    "add_item",
                    {"list_id": "{list.id}", "title": "{title}", "priority": "{priority}"},
                    Added("items", {"list": "{list.id}", "title": "{title}", "priority": "{priority}", "done": False}),
                ),
            ),
        ),
        TaskText(
            (
                '"{item.title}" belongs on the {list.name} list. Please move it there, and tick off "{other.title}".',
                'Tick off "{other.title}", please, and move "{item.title}" over to {list.name}.',
            ),
            {"item": Pick("items"), "other": Pick("items"), "list": Pick("lists")},
            (
                Look("find_item", {"title": "{item.title}"}, "{item.id}"),
                Look("find_list", {"name": "{list.name}"}, "{list.id}"),
                Act(
                    "move_item",
                    {"item_id": "{item.id}", "list_id": "{list.id}"},
                    Has("items", "{item.id}", {"list": "{list.id}", "done": False}),
                ),
                Look("find_item", {"title": "{other.title}"}, "{other.id}"),
                Act("complete_item", {"item_id": "{other.id}"}, Has("items", "{other.id}", {"done": True})),
            ),
            holds=lambda picked: (
                picked["item"].id != picked["other"].id and picked["item"].list.id != picked["list"].id
            ),
        ),
    ),
)

_GOODS = (
    "Copper Wire", "Oak Boards", "Paint Rollers", "Roof Tiles", "Steel Bolts", "Wool Insulation", "Window Putty",
    "Floor Varnish", "Cable Ducts",
)  # fmt: skip
_BAYS = (
    "East Bay", "West Bay", "North Bay", "South Bay", "Cold Store", "Mezzanine", "Loading Dock", "Annex", "Upper Rack",
    "Lower Rack", "Yard Shed", "Mill Hall",
)  # fmt: skip


def _stored(rows: Rows, rng: random.Random) -> None:
    """Each product lies in two bays."""
    bays = list(rows["bays"])
    pairs = [(product, bay) for product in rows["products"] for bay in rng.sample(bays, 2)]
    for row, (product, bay) in zip(rows["lots"].values(), pairs, strict=True):
        row["product"], row["bay"] = product, bay


WAREHOUSE = WorldText(
    name="warehouse stock",
    tables={
        "products": TableText("W", 5, {"name": named(_GOODS)}),
        "bays": TableText("Z", 4, {"name": named(_BAYS), "room": number(400, 500)}),
        "lots": TableText("H", 10, {"product": refers("products"), "bay": refers("bays"), "quantity": number(30, 60)}),
        "moves": TableText(
            "V",
            0,
            {"kind": ColumnText("string"), "lot": refers("lots"), "bay": refers("bays"), "quantity": number(1, 1)},
        ),
    },
    settle=_stored,
    open=("lots.quantity",),
    tools=(
        finder("find_product", "products", "name", "product"),
        finder("find_bay", "bays", "name", "bay"),
        ToolText(
            "find_lot",
            "Find what of a product lies in a bay: the lot's id and its quantity.",
            {"product_id": "Id of the product.", "bay_id": "Id of the bay."},
            """
            row("products", product_id)
            row("bays", bay_id)
            return find("lots", product=product_id, bay=bay_id)
            """,
        ),
        lister("lots_in_bay", "lots", "bay", "bays", "lot", "bay"),
        ToolText(
            "receive_goods",
            "Add delivered pieces to a lot. Refused where the bay has no room for them.",
            {"lot_id": "Id of the lot.", "quantity": "integer: How many pieces."},
            """
            lot = row("lots", lot_id)
            require(quantity > 0, "the quantity must be more than 0")
            load = sum(one["quantity"] for one in every("lots", bay=lot["bay"]))
            require(load + quantity <= row("bays", lot["bay"])["room"], f"bay {lot['bay']} has no room for {quantity}")
            lot["quantity"] += quantity
            return add("moves", "V", kind="received", lot=lot_id, bay=lot["bay"], quantity=quantity)
            """,
        ),
        ToolText(
            "ship_goods",
            "Take pieces out of a lot, to be sent out. Refused where there are not so many.",
            {"lot_id": "Id of the lot.", "quantity": "integer: How many pieces."},
            """
            lot = row("lots", lot_id)
            require(quantity > 0, "the quantity must be more than 0")
            require(quantity <= lot["quantity"], f"lot {lot_id} has only {lot['quantity']} pieces")
            lot["quantity"] -= quantity
            return add("moves", "V", kind="shipped", lot=lot_id, bay=lot["bay"], quantity=quantity)
            """,
        ),
    ),
    invariants={
        "no lot is less than empty": "all(one['quantity'] >= 0 for one in STATE['lots'].values())",
        "no bay is overfull": (
            "all(sum(lot['quantity'] for lot in every('lots', bay=id)) <= one['room'] "
            "for id, one in STATE['bays'].items())"
        ),
    },
    tasks=tuple(
        TaskText(
            phrasings,
            {"lot": Pick("lots"), "pieces": lambda rng: rng.randint(3, 24)},
            (
                Look("find_product", {"name": "{lot.product.name}"}, "{lot.product.id}"),
                Look("find_bay", {"name": "{lot.bay.name}"}, "{lot.bay.id}"),
                Look("find_lot", {"product_id": "{lot.product.id}", "bay_id": "{lot.bay.id}"}, "{lot.id}"),
                Act(
                    tool,
                    {"lot_id": "{lot.id}", "quantity": "{pieces}"},
                    Added("moves", {"kind": kind, "lot": "{lot.id}", "bay": "{lot.bay.id}", "quantity": "{pieces}"}),
                ),
            ),
        )
        for tool, kind, phrasings in (
            (
                "ship_goods",
                "shipped",
                (
                    "Please ship {pieces} pieces of {lot.product.name} from the {lot.bay.name}.",
                    "A customer wants {pieces} {lot.product.name}. Send them out from the {lot.bay.name}.",
                ),
            ),
            (
                "receive_goods",
                "received",
                (
                    "A delivery of {pieces} {lot.product.name} has come to the {lot.bay.name}. Please book it in.",
                    "Please receive {pieces} pieces of {lot.product.name} in the {lot.bay.name}.",
                ),
            ),
        )
    ),
)
