"""Worlds in which times are given away once: a restaurant's bookings, a clinic's appointments, a calendar."""

from __future__ import annotations

import random
from typing import Any

from synthesis.core.records import Rows
from synthesis.offline.worlds.descriptions import (
    HOURS,
    Act,
    Added,
    ColumnText,
    Gone,
    Has,
    Look,
    Pick,
    TableText,
    TaskText,
    ToolText,
    WorldText,
    a_day,
    an_hour,
    finder,
    fixed,
    lister,
    mover,
    named,
    number,
    only_once,
    refers,
)

DAY, HOUR = "Day, as 2026-01-31.", "integer: Full hour, from 8 to 20."
ON_ONE_DAY = "2026-03-{:02d}"


def _spread(table: str, *, day: str = "day", hour: str = "hour") -> Any:
    """Gives the rows of a table days and hours of which no two are the same."""

    def settle(rows: Rows, rng: random.Random) -> None:
        slots = rng.sample([(n, at) for n in range(2, 28) for at in HOURS], len(rows[table]))
        for row, (n, at) in zip(rows[table].values(), slots, strict=True):
            row[day], row[hour] = ON_ONE_DAY.format(n), at

    return settle


def _free(table: str, at: str) -> Any:
    """Whether the drawn day and hour are not taken."""

    def holds(picked: Any) -> bool:
        wanted = (picked["day"], picked["hour"])
        rows = picked[at].rows[table].values()
        return all((one["day"], one["hour"]) != wanted for one in rows)

    return holds


def _only_one(picked: Any) -> bool:
    """Whether the patient sees that doctor once that day, so that the request says which appointment is meant."""
    visit = picked["visit"]
    meant = [visit.rows["appointments"][visit.id][column] for column in ("patient", "doctor", "day")]
    rows = visit.rows["appointments"].values()
    return sum([one[column] for column in ("patient", "doctor", "day")] == meant for one in rows) == 1


_TABLES = (
    "Window Table", "Garden Table", "Corner Booth", "Round Table", "Fireside Table", "Long Table", "Terrace Table",
    "Alcove Table", "Balcony Table", "Cellar Table",
)  # fmt: skip

RESTAURANT = WorldText(
    name="restaurant bookings",
    tables={
        "dining_tables": TableText("D", 6, {"name": named(_TABLES), "seats": number(4, 8)}),
        "bookings": TableText(
            "B",
            9,
            {
                "guest": named(),
                "dining_table": refers("dining_tables"),
                "day": ColumnText("string", a_day),
                "hour": ColumnText("integer", an_hour),
                "people": number(2, 4),
                "status": fixed("booked"),
            },
        ),
    },
    settle=_spread("bookings"),
    tools=(
        finder("find_dining_table", "dining_tables", "name", "table"),
        finder("find_booking", "bookings", "guest", "booking"),
        ToolText(
            "bookings_on", "List the bookings of one day.", {"on_day": DAY}, 'return every("bookings", day=day(on_day))'
        ),
        ToolText(
            "book_table",
            "Book a table for a guest. Refused where it is taken at that time, or has too few seats.",
            {
                "guest": "Full name of the guest.",
                "table_id": "Id of the table.",
                "on_day": DAY,
                "at_hour": HOUR,
                "people": "integer: How many come.",
            },
            """
            table = row("dining_tables", table_id)
            require(1 <= people <= table["seats"], f"table {table_id} has {table['seats']} seats")
            taken = every("bookings", dining_table=table_id, day=day(on_day), hour=hour(at_hour), status="booked")
            require(not taken, f"table {table_id} is taken then")
            return add("bookings", "B", guest=text(guest), dining_table=table_id, day=on_day, hour=at_hour,
                       people=people, status="booked")
            """,
        ),
        mover(
            "cancel_booking",
            "Cancel a booking. Refused where it is cancelled already.",
            "booking",
            "booked",
            "cancelled",
            "booking {booking_id} is cancelled already",
        ),
        ToolText(
            "change_party_size",
            "Change how many people a booking is for. Refused where the table has too few seats.",
            {"booking_id": "Id of the booking.", "people": "integer: How many come now."},
            """
            booking = row("bookings", booking_id)
            require(booking["status"] == "booked", f"booking {booking_id} is cancelled")
            seats = row("dining_tables", booking["dining_table"])["seats"]
            require(1 <= people <= seats, f"the table of booking {booking_id} has {seats} seats")
            booking["people"] = people
            return {"id": booking_id, **booking}
            """,
        ),
    ),
    invariants={
        "no table is given away twice": only_once(
            "bookings", "(one['dining_table'], one['day'], one['hour'])", "one['status'] == 'booked'"
        ),
        "nobody is without a seat": (
            "all(1 <= one['people'] <= STATE['dining_tables'][one['dining_table']]['seats'] "
            "for one in STATE['bookings'].values())"
        ),
    },
    tasks=(
        TaskText(
            (
                "{booking.guest} called: they cannot come. Please cancel their booking.",
                "Please take the booking of {booking.guest} off the book, the guest is ill.",
            ),
            {"booking": Pick("bookings")},
            (
                Look("find_booking", {"guest": "{booking.guest}"}, "{booking.id}"),
                Act(
                    "cancel_booking",
                    {"booking_id": "{booking.id}"},
                    Has("bookings", "{booking.id}", {"status": "cancelled"}),
                ),
            ),
        ),
        TaskText(
            (
                "Book the {table.name} for {guest.guest}, {people} people, on {day} at {hour}:00.",
                "{guest.guest} would like to come again: the {table.name}, on {day}, {hour}:00, party of {people}. "
                "Please book it.",
            ),
            {
                "table": Pick("dining_tables"),
                "guest": Pick("bookings"),
                "day": a_day,
                "hour": an_hour,
                "people": lambda rng: rng.randint(2, 4),
            },
            (
                Look("find_dining_table", {"name": "{table.name}"}, "{table.id}"),
                Act(
                    "book_table",
                    {
                        "guest": "{guest.guest}",
                        "table_id": "{table.id}",
                        "on_day": "{day}",
                        "at_hour": "{hour}",
                        "people": "{people}",
                    },
                    Added(
                        "bookings",
                        {
                            "guest": "{guest.guest}",
                            "dining_table": "{table.id}",
                            "day": "{day}",
                            "hour": "{hour}",
                            "people": "{people}",
                            "status": "booked",
                        },
                    ),
                ),
            ),
            holds=_free("bookings", "table"),
        ),
        TaskText(
            (
                "{booking.guest} is not coming. Please cancel that booking and give the {booking.dining_table.name} at "
                "the same time, {booking.day} at {booking.hour}:00, to {guest.guest}, party of {people}.",
            ),
            {"booking": Pick("bookings"), "guest": Pick("bookings"), "people": lambda rng: rng.randint(2, 4)},
            (
                Look("find_booking", {"guest": "{booking.guest}"}, "{booking.id}"),
                Look("find_dining_table", {"name": "{booking.dining_table.name}"}, "{booking.dining_table.id}"),
                Act(
                    "cancel_booking",
                    {"booking_id": "{booking.id}"},
                    Has("bookings", "{booking.id}", {"status": "cancelled"}),
                ),
                Act(
                    "book_table",
                    {
                        "guest": "{guest.guest}",
                        "table_id": "{booking.dining_table.id}",
                        "on_day": "{booking.day}",
                        "at_hour": "{booking.hour}",
                        "people": "{people}",
                    },
                    Added(
                        "bookings",
                        {
                            "guest": "{guest.guest}",
                            "dining_table": "{booking.dining_table.id}",
                            "day": "{booking.day}",
                            "hour": "{booking.hour}",
                            "people": "{people}",
                            "status": "booked",
                        },
                    ),
                    after=True,
                ),
            ),
            holds=lambda picked: picked["booking"].id != picked["guest"].id,
        ),
    ),
)

_DOCTORS = tuple(
    f"Dr. {name}"
    for name in (
        "Adler",
        "Brandt",
        "Castel",
        "Drew",
        "Elm",
        "Farrow",
        "Gould",
        "Hale",
        "Ince",
        "Jarvis",
        "Kerr",
        "Lowe",
    )
)

CLINIC = WorldText(
    name="clinic appointments",
    tables={
        "doctors": TableText("K", 4, {"name": named(_DOCTORS)}),
        "patients": TableText("P", 9, {"name": named()}),
        "appointments": TableText(
            "A",
            10,
            {
                "doctor": refers("doctors"),
                "patient": refers("patients"),
                "day": ColumnText("string", a_day),
                "hour": ColumnText("integer", an_hour),
                "status": fixed("planned"),
            },
        ),
    },
    settle=_spread("appointments"),
    tools=(
        finder("find_doctor", "doctors", "name", "doctor"),
        finder("find_patient", "patients", "name", "patient"),
        lister("appointments_of_patient", "appointments", "patient", "patients", "appointment", "patient"),
        lister("appointments_of_doctor", "appointments", "doctor", "doctors", "appointment", "doctor"),
        ToolText(
            "book_appointment",
            "Book an appointment of a patient with a doctor. Refused where the doctor or the patient has one then.",
            {"patient_id": "Id of the patient.", "doctor_id": "Id of the doctor.", "on_day": DAY, "at_hour": HOUR},
            """
            row("patients", patient_id)
            row("doctors", doctor_id)
            then = {"day": day(on_day), "hour": hour(at_hour), "status": "planned"}
            require(not every("appointments", doctor=doctor_id, **then), f"doctor {doctor_id} is taken then")
            require(not every("appointments", patient=patient_id, **then), f"patient {patient_id} is elsewhere then")
            return add("appointments", "A", doctor=doctor_id, patient=patient_id, day=on_day, hour=at_hour,
                       status="planned")
            """,
        ),
        mover(
            "cancel_appointment",
            "Cancel a planned appointment.",
            "appointment",
            "planned",
            "cancelled",
            "appointment {appointment_id} is not planned any more",
        ),
    ),
    invariants={
        f"no {who} is at two places": only_once(
            "appointments", f"(one[{who!r}], one['day'], one['hour'])", "one['status'] == 'planned'"
        )
        for who in ("doctor", "patient")
    },
    tasks=(
        TaskText(
            (
                "Please book {patient.name} an appointment with {doctor.name} on {day} at {hour}:00.",
                "{patient.name} needs to see {doctor.name}. {day}, {hour}:00 would suit; please put it down.",
            ),
            {"patient": Pick("patients"), "doctor": Pick("doctors"), "day": a_day, "hour": an_hour},
            (
                Look("find_patient", {"name": "{patient.name}"}, "{patient.id}"),
                Look("find_doctor", {"name": "{doctor.name}"}, "{doctor.id}"),
                Act(
                    "book_appointment",
                    {"patient_id": "{patient.id}", "doctor_id": "{doctor.id}", "on_day": "{day}", "at_hour": "{hour}"},
                    Added(
                        "appointments",
                        {
                            "patient": "{patient.id}",
                            "doctor": "{doctor.id}",
                            "day": "{day}",
                            "hour": "{hour}",
                            "status": "planned",
                        },
                    ),
                ),
            ),
            holds=_free("appointments", "patient"),
        ),
        TaskText(
            (
                "{visit.patient.name} has recovered: the appointment with {visit.doctor.name} on {visit.day} can be "
                "cancelled.",
                "Cancel the appointment that {visit.patient.name} has on {visit.day} with {visit.doctor.name}, please.",
            ),
            {"visit": Pick("appointments")},
            (
                Look("find_patient", {"name": "{visit.patient.name}"}, "{visit.patient.id}"),
                Look("appointments_of_patient", {"patient_id": "{visit.patient.id}"}, "{visit.id}"),
                Act(
                    "cancel_appointment",
                    {"appointment_id": "{visit.id}"},
                    Has("appointments", "{visit.id}", {"status": "cancelled"}),
                ),
            ),
            holds=_only_one,
        ),
    ),
)

_ROOMS = (
    "Aspen Room", "Birch Room", "Cedar Room", "Maple Room", "Olive Room", "Willow Room", "Elm Room", "Hazel Room",
    "Juniper Room", "Larch Room", "Poplar Room", "Rowan Room",
)  # fmt: skip
_EVENTS = (
    "Budget Review", "Design Critique", "Hiring Panel", "Press Briefing", "Quarterly Planning", "Safety Training",
    "Sales Kickoff", "Site Inspection", "Supplier Meeting", "Team Lunch", "Vendor Demo", "Welcome Session",
)  # fmt: skip

CALENDAR = WorldText(
    name="office calendar",
    tables={
        "rooms": TableText("R", 4, {"name": named(_ROOMS)}),
        "events": TableText(
            "E",
            8,
            {
                "title": named(_EVENTS),
                "room": refers("rooms"),
                "day": ColumnText("string", a_day),
                "hour": ColumnText("integer", an_hour),
            },
        ),
    },
    settle=_spread("events"),
    tools=(
        finder("find_room", "rooms", "name", "room"),
        finder("find_event", "events", "title", "event"),
        lister("events_in_room", "events", "room", "rooms", "event", "room"),
        ToolText(
            "add_event",
            "Put an event into the calendar. Refused where the room is taken at that time.",
            {"title": "Title of the event.", "room_id": "Id of the room.", "on_day": DAY, "at_hour": HOUR},
            """
            row("rooms", room_id)
            require(not every("events", room=room_id, day=day(on_day), hour=hour(at_hour)), f"room {room_id} is taken")
            return add("events", "E", title=text(title), room=room_id, day=on_day, hour=at_hour)
            """,
        ),
        ToolText(
            "move_event",
            "Move an event to another time, in the same room. Refused where the room is taken then.",
            {"event_id": "Id of the event.", "on_day": DAY, "at_hour": HOUR},
            """
            event = row("events", event_id)
            taken = every("events", room=event["room"], day=day(on_day), hour=hour(at_hour))
            require(not taken, f"room {event['room']} is taken then")
            event["day"], event["hour"] = on_day, at_hour
            return {"id": event_id, **event}
            """,
        ),
        ToolText(
            "delete_event",
            "Take an event off the calendar for good.",
            {"event_id": "Id of the event."},
            """
            row("events", event_id)
            return {"deleted": event_id, **STATE["events"].pop(event_id)}
            """,
        ),
    ),
    invariants={
        "no room has two events at once": only_once("events", "(one['room'], one['day'], one['hour'])", "True"),
    },
    tasks=(
        TaskText(
            (
                "Please move the {event.title} to {day}, {hour}:00.",
                "The {event.title} does not fit any more: put it on {day} at {hour}:00 instead.",
            ),
            {"event": Pick("events"), "day": a_day, "hour": an_hour},
            (
                Look("find_event", {"title": "{event.title}"}, "{event.id}"),
                Act(
                    "move_event",
                    {"event_id": "{event.id}", "on_day": "{day}", "at_hour": "{hour}"},
                    Has("events", "{event.id}", {"day": "{day}", "hour": "{hour}"}),
                ),
            ),
            holds=_free("events", "event"),
        ),
        TaskText(
            (
                "The {event.title} is off. Please delete it, and use the {event.room.name} on {event.day} at "
                "{event.hour}:00 for a {title} instead.",
                "Delete the {event.title}. In its place, same room ({event.room.name}), same time ({event.day}, "
                "{event.hour}:00), goes a {title}.",
            ),
            {"event": Pick("events"), "title": lambda rng: rng.choice(("Book Club", "Fire Drill", "Poster Session"))},
            (
                Look("find_event", {"title": "{event.title}"}, "{event.id}"),
                Look("find_room", {"name": "{event.room.name}"}, "{event.room.id}"),
                Act("delete_event", {"event_id": "{event.id}"}, Gone("events", "{event.id}")),
                Act(
                    "add_event",
                    {
                        "title": "{title}",
                        "room_id": "{event.room.id}",
                        "on_day": "{event.day}",
                        "at_hour": "{event.hour}",
                    },
                    Added(
                        "events",
                        {"title": "{title}", "room": "{event.room.id}", "day": "{event.day}", "hour": "{event.hour}"},
                    ),
                    after=True,
                ),
            ),
        ),
    ),
)
