"""Worlds in which places are given away once: a garage's spots, the seats of courses."""

from __future__ import annotations

import random
from typing import Any

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
    only_once,
    refers,
)

_SPOTS = tuple(f"Spot {floor}-{n:02d}" for floor in "ABC" for n in range(1, 9))
_PLATES = tuple(
    f"{a}{b} {1107 + 10 * n}" for n, (a, b) in enumerate(zip("BDFHKLMNPRSTVWXZ", "QWXZBDFHKLMNPRST", strict=True))
)


def _parked(rows: Rows, rng: random.Random) -> None:
    """Every stay has a car and a spot of its own; some of each are left."""
    cars, spots = rng.sample(list(rows["cars"]), 6), rng.sample(list(rows["spots"]), 6)
    for row, car, spot in zip(rows["stays"].values(), cars, spots, strict=True):
        row["car"], row["spot"] = car, spot


def _outside(car: Any) -> bool:
    return all(one["car"] != car.id for one in car.rows["stays"].values())


def _empty(spot: Any) -> bool:
    return all(one["spot"] != spot.id for one in spot.rows["stays"].values())


GARAGE = WorldText(
    name="parking garage",
    tables={
        "cars": TableText("C", 10, {"plate": named(_PLATES)}),
        "spots": TableText("S", 10, {"label": named(_SPOTS)}),
        "stays": TableText("Y", 6, {"car": refers("cars"), "spot": refers("spots"), "status": fixed("parked")}),
    },
    settle=_parked,
    tools=(
        finder("find_car", "cars", "plate", "car"),
        finder("find_spot", "spots", "label", "spot"),
        lister("stays_of_car", "stays", "car", "cars", "stay", "car"),
        ToolText(
            "park",
            "Give a spot to a car. Refused where the spot is taken, or the car is parked already.",
            {"car_id": "Id of the car.", "spot_id": "Id of the spot."},
            """
            row("cars", car_id)
            row("spots", spot_id)
            require(not every("stays", car=car_id, status="parked"), f"car {car_id} is parked already")
            require(not every("stays", spot=spot_id, status="parked"), f"spot {spot_id} is taken")
            return add("stays", "Y", car=car_id, spot=spot_id, status="parked")
            """,
        ),
        mover(
            "end_stay",
            "End a stay: the car has left, the spot is free.",
            "stay",
            "parked",
            "left",
            "stay {stay_id} has ended already",
        ),
    ),
    invariants={
        f"no {what} has two stays at once": only_once("stays", f"one[{what!r}]", "one['status'] == 'parked'")
        for what in ("car", "spot")
    },
    tasks=(
        TaskText(
            (
                "The car with the plate {car.plate} has just come in. Please give it {spot.label}.",
                "Please park {car.plate} on {spot.label}.",
            ),
            {"car": Pick("cars", _outside), "spot": Pick("spots", _empty)},
            (
                Look("find_car", {"plate": "{car.plate}"}, "{car.id}"),
                Look("find_spot", {"label": "{spot.label}"}, "{spot.id}"),
                Act(
                    "park",
                    {"car_id": "{car.id}", "spot_id": "{spot.id}"},
                    Added("stays", {"car": "{car.id}", "spot": "{spot.id}", "status": "parked"}),
                ),
            ),
        ),
        TaskText(
            (
                "{stay.car.plate} has left the garage. Please end its stay.",
                "Record that the car {stay.car.plate} drove out.",
            ),
            {"stay": Pick("stays")},
            (
                Look("find_car", {"plate": "{stay.car.plate}"}, "{stay.car.id}"),
                Look("stays_of_car", {"car_id": "{stay.car.id}"}, "{stay.id}"),
                Act("end_stay", {"stay_id": "{stay.id}"}, Has("stays", "{stay.id}", {"status": "left"})),
            ),
        ),
        TaskText(
            (
                "{stay.car.plate} has to change its spot: end its stay, then park it on {spot.label}.",
                "Please move {stay.car.plate} over to {spot.label}, as a new stay; the old one ends.",
            ),
            {"stay": Pick("stays"), "spot": Pick("spots", _empty)},
            (
                Look("find_car", {"plate": "{stay.car.plate}"}, "{stay.car.id}"),
                Look("stays_of_car", {"car_id": "{stay.car.id}"}, "{stay.id}"),
                Look("find_spot", {"label": "{spot.label}"}, "{spot.id}"),
                Act("end_stay", {"stay_id": "{stay.id}"}, Has("stays", "{stay.id}", {"status": "left"})),
                Act(
                    "park",
                    {"car_id": "{stay.car.id}", "spot_id": "{spot.id}"},
                    Added("stays", {"car": "{stay.car.id}", "spot": "{spot.id}", "status": "parked"}),
                    after=True,
                ),
            ),
        ),
    ),
)

_COURSES = (
    "Ancient History", "Botany Basics", "City Planning", "Data Ethics", "Early Music", "Film Studies", "Game Theory",
    "Human Anatomy", "Italian Drama", "Marine Biology",
)  # fmt: skip


def _seated(rows: Rows, rng: random.Random) -> None:
    """No student is twice in a course; half of the courses are full."""
    pairs = [(student, course) for student in rows["students"] for course in rows["courses"]]
    for row, (student, course) in zip(rows["enrolments"].values(), rng.sample(pairs, 12), strict=True):
        row["student"], row["course"] = student, course
    for n, (id, taught) in enumerate(rows["courses"].items()):
        taught["seats"] = sum(one["course"] == id for one in rows["enrolments"].values()) + (n % 2) * 2


def _full(course: Any) -> bool:
    return sum(one["course"] == course.id for one in course.rows["enrolments"].values()) == course.seats


def _can_enrol(picked: Any) -> bool:
    """Whether a student has room for one more course, which is none of theirs."""
    student, course = picked["student"], picked["course"]
    own = [one["course"] for one in course.rows["enrolments"].values() if one["student"] == student.id]
    return len(own) < 4 and course.id not in own


COURSES = WorldText(
    name="course enrolment",
    tables={
        "students": TableText("N", 8, {"name": named()}),
        "courses": TableText("L", 6, {"title": named(_COURSES), "seats": number(1, 1)}),
        "enrolments": TableText(
            "Q", 12, {"student": refers("students"), "course": refers("courses"), "status": fixed("active")}
        ),
    },
    settle=_seated,
    tools=(
        finder("find_student", "students", "name", "student"),
        finder("find_course", "courses", "title", "course"),
        lister("enrolments_of_student", "enrolments", "student", "students", "enrolment", "student"),
        lister("enrolments_in_course", "enrolments", "course", "courses", "enrolment", "course"),
        ToolText(
            "enrol",
            "Enrol a student in a course. Refused where it is full, or the student is in it or has 4 courses already.",
            {"student_id": "Id of the student.", "course_id": "Id of the course."},
            """
            row("students", student_id)
            seats = row("courses", course_id)["seats"]
            own = every("enrolments", student=student_id, status="active")
            require(all(one["course"] != course_id for one in own), f"student {student_id} is in it already")
            require(len(own) < 4, f"student {student_id} has 4 courses already")
            require(len(every("enrolments", course=course_id, status="active")) < seats, f"course {course_id} is full")
            return add("enrolments", "Q", student=student_id, course=course_id, status="active")
            """,
        ),
        mover(
            "withdraw",
            "End an active enrolment; the seat is free again.",
            "enrolment",
            "active",
            "withdrawn",
            "enrolment {enrolment_id} has ended already",
        ),
    ),
    invariants={
        "no course has more students than seats": (
            "all(len(every('enrolments', course=id, status='active')) <= one['seats'] "
            "for id, one in STATE['courses'].items())"
        ),
        "nobody is twice in a course": only_once(
            "enrolments", "(one['student'], one['course'])", "one['status'] == 'active'"
        ),
    },
    tasks=(
        TaskText(
            (
                "Please enrol {student.name} in {course.title}.",
                "{student.name} would like to take {course.title}. There are seats left; sign them up.",
            ),
            {"student": Pick("students"), "course": Pick("courses", lambda course: not _full(course))},
            (
                Look("find_student", {"name": "{student.name}"}, "{student.id}"),
                Look("find_course", {"title": "{course.title}"}, "{course.id}"),
                Act(
                    "enrol",
                    {"student_id": "{student.id}", "course_id": "{course.id}"},
                    Added("enrolments", {"student": "{student.id}", "course": "{course.id}", "status": "active"}),
                ),
            ),
            holds=_can_enrol,
        ),
        TaskText(
            (
                "{place.course.title} is full. {place.student.name} gives the seat up, and {student.name} takes it: "
                "please withdraw the one and enrol the other.",
            ),
            {"place": Pick("enrolments", lambda row: _full(row.course)), "student": Pick("students")},
            (
                Look("find_student", {"name": "{place.student.name}"}, "{place.student.id}"),
                Look("enrolments_of_student", {"student_id": "{place.student.id}"}, "{place.id}"),
                Look("find_student", {"name": "{student.name}"}, "{student.id}"),
                Look("find_course", {"title": "{place.course.title}"}, "{place.course.id}"),
                Act(
                    "withdraw", {"enrolment_id": "{place.id}"}, Has("enrolments", "{place.id}", {"status": "withdrawn"})
                ),
                Act(
                    "enrol",
                    {"student_id": "{student.id}", "course_id": "{place.course.id}"},
                    Added("enrolments", {"student": "{student.id}", "course": "{place.course.id}", "status": "active"}),
                    after=True,
                ),
            ),
            holds=lambda picked: (
                picked["student"].id != picked["place"].student.id
                and _can_enrol({"student": picked["student"], "course": picked["place"].course})
            ),
        ),
    ),
)
