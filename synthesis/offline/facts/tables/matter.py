"""Elements and isotopes (periodictable) and units of measurement (Pint)."""

from __future__ import annotations

import periodictable
import pint

from synthesis.offline.facts.names import canonical, functional, inverse
from synthesis.offline.facts.relations import Relation
from synthesis.offline.facts.tables import relation

MAX_ISOTOPES = 1200

_UNITS = [
    "meter", "kilometer", "centimeter", "millimeter", "inch", "foot", "yard", "mile", "nautical_mile", "fathom",
    "furlong", "rod", "chain", "league", "hand", "astronomical_unit", "angstrom", "gram",
    "kilogram", "tonne", "pound", "ounce", "stone", "grain", "carat", "slug", "short_ton", "long_ton", "troy_ounce",
    "pennyweight", "dram", "second", "minute", "hour", "day", "week", "fortnight", "century", "millennium",
    "liter", "milliliter", "gallon", "quart", "pint", "cup", "fluid_ounce", "tablespoon", "teaspoon", "barrel",
    "bushel", "peck", "gill", "hectare", "acre", "newton", "dyne", "pound_force", "kilogram_force", "joule", "erg",
    "calorie", "british_thermal_unit", "electron_volt", "kilowatt_hour", "therm", "watt", "horsepower", "pascal",
    "bar", "atmosphere", "torr", "millimeter_Hg", "hertz", "knot", "volt", "ohm",
    "farad", "henry", "weber", "tesla", "ampere", "coulomb", "kelvin", "lumen", "lux", "candela",
    "becquerel", "curie", "gray", "sievert", "radian", "degree", "mole", "poise", "stokes",
    "hectometer", "dekameter", "megameter", "megagram", "kilojoule", "megajoule", "kilowatt", "megawatt",
    "kilonewton", "kilopascal", "hectopascal", "megapascal", "kilohertz", "megahertz", "gigahertz", "kilovolt",
    "milliampere", "millivolt", "centiliter", "hectoliter",
]  # fmt: skip


def build() -> list[Relation]:
    return [*_elements(), *_isotopes(), *_units()]


def _elements() -> list[Relation]:
    every = [element for element in periodictable.elements if element.number > 0]  # number 0 is the bare neutron
    symbol = {e.name: e.symbol for e in every}
    number = {e.name: e.number for e in every}
    return [
        relation(
            "symbol_of_element", "elements", ("element", "element_symbol"), symbol,
            ("the chemical symbol of", "the element symbol of"), ("元素符号",),
            about=("Look up the chemical symbol of an element.", "查询一种元素的符号。"),
        ),
        relation(
            "element_of_symbol", "elements", ("element_symbol", "element"), inverse(symbol),
            ("the element with symbol", "the element written as"), ("符号对应元素",),
            about=("Find the element that has a chemical symbol.", "根据元素符号查询元素。"),
        ),
        relation(
            "atomic_number_of_element", "elements", ("element", "atomic_number"), number,
            ("the atomic number of", "the proton number of"), ("原子序数",),
            about=("Look up the atomic number of an element.", "查询一种元素的原子序数。"),
        ),
        relation(
            "element_of_atomic_number", "elements", ("atomic_number", "element"), inverse(number),
            ("the element with atomic number", "the element with proton number"), ("原子序数对应元素",),
            about=("Find the element that has an atomic number.", "根据原子序数查询元素。"),
        ),
        relation(
            "atomic_mass_of_element", "elements", ("element", "number"), {e.name: round(e.mass, 3) for e in every},
            ("the atomic mass of", "the atomic weight of"), ("原子量",),
            about=("Look up the atomic mass of an element in unified mass units.", "查询一种元素的原子量。"), unit="u",
        ),
        relation(
            "density_of_element", "elements", ("element", "number"),
            {e.name: round(e.density, 3) for e in every if e.density and round(e.density, 3) > 0},
            ("the density of", "the mass density of"), ("密度",),
            about=("Look up the density of an element in grams per cubic centimetre.",
                   "查询一种元素的密度（克/立方厘米）。"),
            unit="g/cm3",
        ),
    ]  # fmt: skip


def _isotopes() -> list[Relation]:
    every = [
        (element, isotope, f"{element.name}-{isotope}", element[isotope])
        for element in periodictable.elements
        if element.number > 0
        for isotope in element.isotopes
    ]
    # Natural isotopes first, then those nearest to the element's atomic mass: the ones that people ask about.
    every.sort(key=lambda row: (not row[3].abundance, abs(row[1] - row[0].mass), row[0].number))
    chosen = sorted(every[:MAX_ISOTOPES], key=lambda row: (row[0].number, row[1]))
    main: dict[str, tuple[float, str]] = {}
    for element, _, name, isotope in chosen:
        if isotope.abundance:
            main[element.name] = max(main.get(element.name, (0.0, "")), (isotope.abundance, name))
    counted = [(e.name, len(e.isotopes)) for e in periodictable.elements if e.number > 0]
    return [
        relation(
            "element_of_isotope", "isotopes", ("isotope", "element"), {name: e.name for e, _, name, _ in chosen},
            ("the parent element of", "the chemical element of"), ("同位素所属元素",),
            about=("Look up the element to which an isotope belongs.", "查询一种同位素所属的元素。"),
        ),
        relation(
            "neutrons_of_isotope", "isotopes", ("isotope", "number"), {name: a - e.number for e, a, name, _ in chosen},
            ("the neutron count of", "the number of neutrons of"), ("中子数",),
            about=("Count the neutrons in the nucleus of an isotope.", "查询一种同位素的中子数。"), unit="neutrons",
        ),
        relation(
            "mass_of_isotope", "isotopes", ("isotope", "number"), {name: round(i.mass, 3) for _, _, name, i in chosen},
            ("the isotope mass of", "the isotopic mass of"), ("同位素质量",),
            about=("Look up the mass of an isotope in unified mass units.", "查询一种同位素的质量。"), unit="u",
        ),
        relation(
            "abundance_of_isotope", "isotopes", ("isotope", "number"),
            {name: round(i.abundance, 3) for _, _, name, i in chosen if i.abundance and round(i.abundance, 3) > 0},
            ("the natural abundance of", "the abundance percentage of"), ("天然丰度",),
            about=("Look up the natural abundance of an isotope in percent.", "查询一种同位素的天然丰度（百分比）。"),
            unit="%",
        ),
        relation(
            "main_isotope_of_element", "isotopes", ("element", "isotope"),
            {name: best for name, (_, best) in main.items()},
            ("the most abundant isotope of", "the main isotope of"), ("最丰富同位素",),
            about=("Look up the most abundant isotope of an element.", "查询一种元素丰度最高的同位素。"),
        ),
        relation(
            "isotope_count_of_element", "isotopes", ("element", "number"), {name: n for name, n in counted if n},
            ("the known isotope count of", "the number of isotopes of"), ("已知同位素数量",),
            about=("Count the tabulated isotopes of an element.", "查询一种元素已列出的同位素数量。"),
        ),
    ]  # fmt: skip


def _units() -> list[Relation]:
    registry: pint.UnitRegistry = pint.UnitRegistry()
    units = functional((canonical(name.replace("_", " ")), registry.Quantity(1, name)) for name in _UNITS)
    written = {name: f"{one.units:~}" for name, one in units.items()}
    # Symbols outside ASCII (ångström) are left out, and so are units that have none and repeat their name.
    symbol = {n: text for n, text in written.items() if canonical(text) == text and text.replace("_", " ") != n}
    base: dict[str, str] = {}
    value: dict[str, float] = {}
    dimension: dict[str, str] = {}
    for name, one in units.items():
        in_base = one.to_base_units()
        unit = canonical(f"{in_base.units:C}".replace("**", ""))
        if unit is not None and unit != name and len(unit) < 16:
            base[name] = unit
        # Three decimals must carry the value; units with a smaller SI value are left out.
        size = round(float(in_base.magnitude), 3)
        if size != 1 and abs(size - in_base.magnitude) <= 1e-3 * abs(in_base.magnitude):
            value[name] = int(size) if size.is_integer() else size
        text = str(one.dimensionality).replace("[", "").replace("]", "").replace(" ** ", "^")
        dimension[name] = "dimensionless" if text == "dimensionless" else text
    return [
        relation(
            "symbol_of_unit", "units", ("unit", "unit_symbol"), symbol,
            ("the unit symbol of", "the symbol used for"), ("单位符号",),
            about=("Look up the symbol of a unit of measurement.", "查询一个计量单位的符号。"),
        ),
        relation(
            "unit_of_symbol", "units", ("unit_symbol", "unit"), inverse(symbol),
            ("the unit with symbol", "the unit written as"), ("符号对应单位",),
            about=("Find the unit of measurement that has a symbol.", "根据符号查询计量单位。"),
        ),
        relation(
            "si_value_of_unit", "units", ("unit", "number"), value,
            ("the SI value of", "the SI base amount of"), ("国际单位数值",),
            about=("Convert one of a unit to SI base units (three decimals).",
                   "把一个计量单位换算为国际单位制基本单位（三位小数）。"),
        ),
        relation(
            "base_unit_of_unit", "units", ("unit", "text"), base,
            ("the SI base unit of", "the base unit of"), ("基本单位",),
            about=("Look up the SI base units behind a unit.", "查询一个计量单位对应的国际单位制基本单位。"),
        ),
        relation(
            "dimension_of_unit", "units", ("unit", "text"), dimension,
            ("the dimension of", "the physical dimension of"), ("量纲",),
            about=("Look up the physical dimension of a unit.", "查询一个计量单位的量纲。"),
        ),
    ]  # fmt: skip
