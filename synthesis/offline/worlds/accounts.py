"""Worlds in which what is held must add up: a bank's accounts, the orders of a shop."""

from __future__ import annotations

import random

from synthesis.core.records import Rows
from synthesis.offline.worlds.descriptions import (
    Act,
    Added,
    Has,
    Look,
    Pick,
    TableText,
    TaskText,
    ToolText,
    WorldText,
    finder,
    fixed,
    lister,
    mover,
    named,
    number,
    one_of,
    refers,
)


def _owned(rows: Rows, rng: random.Random) -> None:
    """Everybody has one account of each kind."""
    pairs = [(owner, kind) for owner in rows["customers"] for kind in ("current", "savings")]
    for row, (owner, kind) in zip(rows["accounts"].values(), pairs, strict=True):
        row["owner"], row["kind"] = owner, kind
        row["opening"] = row["balance"]


BANK = WorldText(
    name="bank accounts",
    tables={
        "customers": TableText("U", 6, {"name": named()}),
        "accounts": TableText(
            "X",
            12,
            {
                "owner": refers("customers"),
                "kind": one_of("current", "savings"),
                "opening": number(1, 1),
                "balance": number(300, 900),
                "limit": number(200, 400),
                "status": fixed("open"),
            },
        ),
        "transfers": TableText(
            "T", 0, {"source": refers("accounts"), "target": refers("accounts"), "amount": number(1, 1)}
        ),
    },
    settle=_owned,
    open=("accounts.balance",),
    tools=(
        finder("find_customer", "customers", "name", "customer"),
        ToolText(
            "find_account",
            "Find a customer's account of a kind: its id, balance, limit and status.",
            {"customer_id": "Id of the customer.", "kind": "current or savings."},
            'row("customers", customer_id)\nreturn find("accounts", owner=customer_id, kind=kind)',
        ),
        ToolText(
            "transfer",
            "Transfer an amount from one account to another. Refused above the limit of one transfer, or the balance.",
            {
                "from_account": "Id of the account that pays.",
                "to_account": "Id of the account that is paid.",
                "amount": "integer: How much, in euros.",
            },
            """
            source, target = row("accounts", from_account), row("accounts", to_account)
            require(from_account != to_account, "the accounts must be two")
            for id, one in ((from_account, source), (to_account, target)):
                require(one["status"] == "open", f"account {id} is frozen")
            require(amount > 0, "the amount must be more than 0")
            require(amount <= source["limit"], f"the limit of account {from_account} is {source['limit']} a transfer")
            require(amount <= source["balance"], f"account {from_account} has only {source['balance']}")
            source["balance"] -= amount
            target["balance"] += amount
            return add("transfers", "T", source=from_account, target=to_account, amount=amount)
            """,
        ),
        ToolText(
            "set_limit",
            "Set how much one transfer from an account may be.",
            {"account_id": "Id of the account.", "limit": "integer: The new limit, 0 to 5000 euros."},
            """
            account = row("accounts", account_id)
            require(0 <= limit <= 5000, "the limit is from 0 to 5000")
            account["limit"] = limit
            return {"id": account_id, **account}
            """,
        ),
        mover(
            "freeze_account",
            "Freeze an account: nothing is paid from it or to it any more.",
            "account",
            "open",
            "frozen",
            "account {account_id} is frozen already",
        ),
    ),
    invariants={
        "no account is overdrawn": "all(one['balance'] >= 0 for one in STATE['accounts'].values())",
        "what accounts hold is what was transferred": (
            "all(one['balance'] == one['opening'] + sum(t['amount'] for t in every('transfers', target=id)) "
            "- sum(t['amount'] for t in every('transfers', source=id)) for id, one in STATE['accounts'].items())"
        ),
    },
    tasks=(
        TaskText(
            (
                "I am {own.owner.name}. Please move {amount} euros from my {own.kind} account to my {other.kind} one.",
                "{own.owner.name} wants {amount} euros moved from the {own.kind} to the {other.kind} account.",
            ),
            {"own": Pick("accounts"), "other": Pick("accounts"), "amount": lambda rng: rng.randint(20, 150)},
            (
                Look("find_customer", {"name": "{own.owner.name}"}, "{own.owner.id}"),
                Look("find_account", {"customer_id": "{own.owner.id}", "kind": "{own.kind}"}, "{own.id}"),
                Look("find_account", {"customer_id": "{own.owner.id}", "kind": "{other.kind}"}, "{other.id}"),
                Act(
                    "transfer",
                    {"from_account": "{own.id}", "to_account": "{other.id}", "amount": "{amount}"},
                    Added("transfers", {"source": "{own.id}", "target": "{other.id}", "amount": "{amount}"}),
                ),
            ),
            holds=lambda picked: (
                picked["own"].id != picked["other"].id and picked["own"].owner.id == picked["other"].owner.id
            ),
        ),
        TaskText(
            (
                "{account.owner.name} has lost their card. Please freeze the {account.kind} account.",
                "Freeze the {account.kind} account of {account.owner.name} at once, please.",
            ),
            {"account": Pick("accounts")},
            (
                Look("find_customer", {"name": "{account.owner.name}"}, "{account.owner.id}"),
                Look("find_account", {"customer_id": "{account.owner.id}", "kind": "{account.kind}"}, "{account.id}"),
                Act(
                    "freeze_account",
                    {"account_id": "{account.id}"},
                    Has("accounts", "{account.id}", {"status": "frozen"}),
                ),
            ),
        ),
        TaskText(
            (
                "{account.owner.name} wants to pay {amount} euros to {other.owner.name}, both from and to {other.kind} "
                "accounts, but the limit is lower. Please set the limit to {limit} and then make the transfer.",
            ),
            {
                "account": Pick("accounts"),
                "other": Pick("accounts"),
                "amount": lambda rng: rng.randint(420, 560),
                "limit": lambda rng: rng.choice((600, 700, 800, 1_000)),
            },
            (
                Look("find_customer", {"name": "{account.owner.name}"}, "{account.owner.id}"),
                Look("find_account", {"customer_id": "{account.owner.id}", "kind": "{account.kind}"}, "{account.id}"),
                Look("find_customer", {"name": "{other.owner.name}"}, "{other.owner.id}"),
                Look("find_account", {"customer_id": "{other.owner.id}", "kind": "{other.kind}"}, "{other.id}"),
                Act(
                    "set_limit",
                    {"account_id": "{account.id}", "limit": "{limit}"},
                    Has("accounts", "{account.id}", {"limit": "{limit}"}),
                ),
                Act(
                    "transfer",
                    {"from_account": "{account.id}", "to_account": "{other.id}", "amount": "{amount}"},
                    Added("transfers", {"source": "{account.id}", "target": "{other.id}", "amount": "{amount}"}),
                    after=True,
                ),
            ),
            holds=lambda picked: (
                picked["account"].owner.id != picked["other"].owner.id
                and picked["account"].kind == picked["other"].kind
                and picked["account"].balance >= picked["amount"]
            ),
        ),
    ),
)

_WARES = (
    "Desk Lamp", "Field Guide", "Garden Hose", "Linen Towel", "Oil Lantern", "Picnic Basket", "Travel Mug",
    "Wool Scarf", "Yoga Mat",
)  # fmt: skip


def _supplied(rows: Rows, rng: random.Random) -> None:
    """What is left of a product is what was supplied and not ordered."""
    pairs = [(customer, product) for customer in rows["customers"] for product in rows["products"]]
    for row, (customer, product) in zip(rows["orders"].values(), rng.sample(pairs, 9), strict=True):
        row["customer"], row["product"] = customer, product
    for id, ware in rows["products"].items():
        ordered = sum(int(one["quantity"]) for one in rows["orders"].values() if one["product"] == id)
        ware["left"] = int(ware["supplied"]) - ordered


SHOP = WorldText(
    name="shop orders",
    tables={
        "customers": TableText("J", 7, {"name": named()}),
        "products": TableText("F", 6, {"title": named(_WARES), "supplied": number(20, 40), "left": number(1, 1)}),
        "orders": TableText(
            "O",
            9,
            {
                "customer": refers("customers"),
                "product": refers("products"),
                "quantity": number(1, 2),
                "status": fixed("open"),
            },
        ),
    },
    settle=_supplied,
    open=("products.left",),
    tools=(
        finder("find_customer", "customers", "name", "customer"),
        finder("find_product", "products", "title", "product"),
        lister("orders_of_customer", "orders", "customer", "customers", "order", "customer"),
        ToolText(
            "place_order",
            "Place an order for a customer. Refused where not so many are left.",
            {
                "customer_id": "Id of the customer.",
                "product_id": "Id of the product.",
                "quantity": "integer: How many.",
            },
            """
            row("customers", customer_id)
            product = row("products", product_id)
            require(quantity > 0, "the quantity must be more than 0")
            require(quantity <= product["left"], f"only {product['left']} of {product_id} are left")
            product["left"] -= quantity
            return add("orders", "O", customer=customer_id, product=product_id, quantity=quantity, status="open")
            """,
        ),
        ToolText(
            "cancel_order",
            "Cancel an order that has not been sent yet; what was ordered can be sold again.",
            {"order_id": "Id of the order."},
            """
            order = row("orders", order_id)
            require(order["status"] == "open", f"order {order_id} is {order['status']}")
            order["status"] = "cancelled"
            row("products", order["product"])["left"] += order["quantity"]
            return {"id": order_id, **order}
            """,
        ),
        mover(
            "send_order",
            "Record that an order was sent out.",
            "order",
            "open",
            "sent",
            "order {order_id} is {order['status']}",
        ),
    ),
    invariants={
        "nothing is sold that is not there": "all(one['left'] >= 0 for one in STATE['products'].values())",
        "what is left and what was ordered is what was supplied": (
            "all(one['left'] + sum(o['quantity'] for o in every('orders', product=id) if o['status'] != 'cancelled') "
            "== one['supplied'] for id, one in STATE['products'].items())"
        ),
    },
    tasks=(
        *(
            TaskText(
                phrasings,
                {"order": Pick("orders")},
                (
                    Look("find_customer", {"name": "{order.customer.name}"}, "{order.customer.id}"),
                    Look("orders_of_customer", {"customer_id": "{order.customer.id}"}, "{order.id}"),
                    Act(tool, {"order_id": "{order.id}"}, Has("orders", "{order.id}", {"status": status})),
                ),
            )
            for tool, status, phrasings in (
                (
                    "cancel_order",
                    "cancelled",
                    (
                        "{order.customer.name} does not want the {order.product.title} any more; cancel that order.",
                        "Please cancel the order of a {order.product.title} by {order.customer.name}.",
                    ),
                ),
                (
                    "send_order",
                    "sent",
                    (
                        "The {order.product.title} for {order.customer.name} went out this morning. Please record it.",
                        "Please mark the order of {order.customer.name}, {order.product.title}, as sent.",
                    ),
                ),
            )
        ),
        TaskText(
            (
                "{customer.name} would like {pieces} of the {product.title}. Please place the order.",
                "Please order {pieces} x {product.title} for {customer.name}.",
            ),
            {"customer": Pick("customers"), "product": Pick("products"), "pieces": lambda rng: rng.randint(3, 7)},
            (
                Look("find_customer", {"name": "{customer.name}"}, "{customer.id}"),
                Look("find_product", {"title": "{product.title}"}, "{product.id}"),
                Act(
                    "place_order",
                    {"customer_id": "{customer.id}", "product_id": "{product.id}", "quantity": "{pieces}"},
                    Added(
                        "orders",
                        {
                            "customer": "{customer.id}",
                            "product": "{product.id}",
                            "quantity": "{pieces}",
                            "status": "open",
                        },
                    ),
                ),
            ),
        ),
    ),
)
