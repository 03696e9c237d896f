"""Types are read by from many threads, whichever asks first."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from astra_jax.base.typed import convert_to, decode_json, decode_msgpack, value_or_json

ROOT = Path(__file__).parents[3]
FIRST_READS = '''
import sys, threading
import msgspec
from astra_jax.base import typed

sys.setswitchinterval(1e-6)
VALUE = {"a": 1, "b": [{"a": {"a": [{"x": 1, "y": "s"}], "b": 1}, "b": "s"}], "c": {"k": {"a": [], "b": 2}}}
READ = {
    "decode_json": lambda kind: typed.decode_json(msgspec.json.encode(VALUE), kind),
    "decode_msgpack": lambda kind: typed.decode_msgpack(msgspec.msgpack.encode(VALUE), kind),
    "convert_to": lambda kind: typed.convert_to(VALUE, kind),
}[sys.argv[1]]


def of_their_own():
    """Structs that nobody has read by: what one makes of another is written down, as in modules' annotations."""
    names = {}
    exec("""
import msgspec
class D(msgspec.Struct):
    x: int
    y: str
class C(msgspec.Struct):
    a: list[D]
    b: int
class B(msgspec.Struct):
    a: C | None
    b: str
class A(msgspec.Struct):
    a: int
    b: list[B]
    c: dict[str, C]
""", names)
    return names["A"]


for _ in range(300):
    kind, gate, found = of_their_own(), threading.Barrier(4), []

    def read():
        gate.wait()
        found.append(READ(kind))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(msgspec.to_builtins(one) == VALUE for one in found)
'''


@pytest.mark.parametrize("how", ["decode_json", "decode_msgpack", "convert_to"])
def test_a_type_that_several_threads_read_by_at_first_ends_no_process(how):
    """Data workers read records in two threads: now and then one was ended by a segmentation fault when it began."""
    done = subprocess.run([sys.executable, "-c", FIRST_READS, how], cwd=ROOT, timeout=120, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_values_are_read_as_the_type_or_the_field_is_named():
    class Point(msgspec.Struct):
        x: int

    for read, given, wrong in (
        (decode_json, b'{"x": 1}', b'{"x": "1"}'),
        (decode_msgpack, msgspec.msgpack.encode({"x": 1}), msgspec.msgpack.encode({"x": "1"})),
        (convert_to, {"x": 1}, {"x": "1"}),
    ):
        assert read(given, Point) == Point(1)
        with pytest.raises(msgspec.ValidationError, match=r"`\$\.x`"):
            read(wrong, Point)
    assert convert_to([{"x": 1}], list[Point]) == [Point(1)]
    assert value_or_json({"x": 1}, Point) == value_or_json('{"x": 1}', Point) == Point(1)
    with pytest.raises(msgspec.DecodeError, match="truncated"):
        decode_json(b"{", Point)


def gives_a_type(node: ast.Call) -> bool:
    called = ast.unparse(node.func)
    if not called.startswith("msgspec."):
        return False
    typed = called.endswith(".decode") and any(keyword.arg == "type" for keyword in node.keywords)
    return typed or called.endswith(".Decoder") or called == "msgspec.convert"


def test_nothing_else_gives_msgspec_a_type_to_read_by():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for layer in ("sandbox", "synthesis", "astra_jax", "configs", "launch", "benchmarks")
        for path in sorted((ROOT / layer).rglob("*.py"))
        if "build" not in path.parts and path != ROOT / "astra_jax/base/typed.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and gives_a_type(node)
    ]
    assert not found, f"{found}: by astra_jax.base.typed, as two threads at once end the process otherwise"
