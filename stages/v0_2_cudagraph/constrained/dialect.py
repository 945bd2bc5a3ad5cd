"""The regex dialect of constrained decoding: Python's `re`, less what no finite automaton can follow.

A pattern is read by Python's own parser, so that every escape, class and quantifier means here what it means to
``re.fullmatch``, which the whole output has to satisfy. Then it becomes a tree of four kinds of node:

- ``\\w``, ``\\d``, ``\\s`` and their complements are Unicode classes, ``.`` is anything but a newline;
- groups only group; greedy and lazy quantifiers are the same, since the whole text must match;
- ``^``, ``\\A``, ``$`` and ``\\Z`` are dropped at the outer edges, where they say nothing new;
- refused by name: anchors elsewhere, ``\\b`` and ``\\B``, lookahead and lookbehind, back-references,
  conditionals, atomic groups, possessive quantifiers, flags.

Runs in the main process, within milliseconds. Trees live until their pattern is compiled.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from .char_sets import ANY_CHAR, NOT_NEWLINE, CharSet, python_class, union

MAX_LENGTH = 4096
"""Characters of a pattern."""

MAX_POSITIONS = 10_000
"""Characters and classes once counted repeats are written out; ``\\d{3}`` has three."""

MAX_DEPTH = 64
"""Groups and quantifiers inside each other."""


class RegexError(ValueError):
    """A pattern that cannot be served; the message is one line for the client."""


@dataclass(frozen=True)
class Chars:
    """One character: a literal or a class as Python's parser names it. `char_set` says which characters."""

    code: Any
    argument: Hashable


@dataclass(frozen=True)
class Sequence:
    """The parts one after the other; without parts, the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Choice:
    """Any one of the branches."""

    branches: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """The body ``low`` to ``high`` times; ``high`` None: without end."""

    body: Node
    low: int
    high: int | None


Node = Chars | Sequence | Choice | Repeat

_CATEGORIES = {
    op.CATEGORY_DIGIT: r"\d",
    op.CATEGORY_NOT_DIGIT: r"\D",
    op.CATEGORY_SPACE: r"\s",
    op.CATEGORY_NOT_SPACE: r"\S",
    op.CATEGORY_WORD: r"\w",
    op.CATEGORY_NOT_WORD: r"\W",
}

_CHARACTER_CODES = {op.ANY, op.LITERAL, op.NOT_LITERAL, op.IN}

_START_ANCHORS = {op.AT_BEGINNING: "^", op.AT_BEGINNING_STRING: r"\A"}
_END_ANCHORS = {op.AT_END: "$", op.AT_END_STRING: r"\Z"}
_BOUNDARIES = {op.AT_BOUNDARY: r"\b", op.AT_NON_BOUNDARY: r"\B"}

_REFUSED = {
    op.GROUPREF: "a back-reference",
    op.GROUPREF_EXISTS: "a conditional group",
    op.ATOMIC_GROUP: "an atomic group",
    op.POSSESSIVE_REPEAT: "a possessive quantifier",
}


def parse(pattern: str) -> Node:
    """The tree of ``pattern``; raises `RegexError`, naming the construct, for what the dialect leaves out."""
    if len(pattern) > MAX_LENGTH:
        raise RegexError(f"regex has {len(pattern)} characters; at most {MAX_LENGTH} are served.")
    items = _python_parse(pattern)
    if items.state.flags & ~re.UNICODE:
        raise _unsupported("a flag such as (?i)")
    tree = _sequence(items, at_start=True, at_end=True, depth=0)
    positions = count_positions(tree)
    if positions > MAX_POSITIONS:
        raise RegexError(
            f"regex describes {positions} characters once its repeats are written out; at most {MAX_POSITIONS} "
            "are served."
        )
    return tree


def count_positions(node: Node) -> int:
    """How many characters and classes ``node`` has with its counted repeats written out."""
    match node:
        case Chars():
            return 1
        case Sequence(parts=nodes) | Choice(branches=nodes):
            return sum(map(count_positions, nodes))
        case Repeat(body=body, low=low, high=high):
            return count_positions(body) * max(low, high or 1)


def _python_parse(pattern: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as "possible nested set": the meaning is still `re`'s
            return _parser.parse(pattern)
    except re.error as error:
        where = "" if error.pos is None else f" at position {error.pos}"
        raise RegexError(f"regex is not valid: {error.msg}{where}.") from None
    except OverflowError:
        raise RegexError("regex is not valid: a repeat count is too large.") from None
    except RecursionError:
        raise _too_deep() from None


def _sequence(items: Iterable[Any], at_start: bool, at_end: bool, depth: int) -> Node:
    """``items`` in a row; the flags say whether they begin, or end, the whole text."""
    if depth > MAX_DEPTH:
        raise _too_deep()
    rest = list(items)
    while rest and at_start and _is_anchor(rest[0], _START_ANCHORS):
        del rest[0]
    while rest and at_end and _is_anchor(rest[-1], _END_ANCHORS):
        del rest[-1]
    last = len(rest) - 1
    parts = [_node(item, at_start and i == 0, at_end and i == last, depth) for i, item in enumerate(rest)]
    return parts[0] if len(parts) == 1 else Sequence(tuple(parts))


def _is_anchor(item: Any, anchors: dict[Any, str]) -> bool:
    return item[0] is op.AT and item[1] in anchors


def _node(item: Any, at_start: bool, at_end: bool, depth: int) -> Node:
    code, argument = item
    if code is op.SUBPATTERN:
        _, add_flags, del_flags, body = argument
        if add_flags or del_flags:
            raise _unsupported("a flag such as (?i:…)")
        return _sequence(body, at_start, at_end, depth + 1)
    if code is op.BRANCH:
        return Choice(tuple(_sequence(branch, at_start, at_end, depth + 1) for branch in argument[1]))
    if code in (op.MAX_REPEAT, op.MIN_REPEAT):
        low, high, body = argument
        return Repeat(_sequence(body, False, False, depth + 1), low, None if high is op.MAXREPEAT else high)
    if code is op.AT:
        raise _unsupported(_anchor_name(argument))
    if code in (op.ASSERT, op.ASSERT_NOT):
        raise _unsupported("a lookahead" if argument[0] > 0 else "a lookbehind")
    if code in _REFUSED:
        raise _unsupported(_REFUSED[code])
    if code in _CHARACTER_CODES:
        return Chars(code, tuple(argument) if code is op.IN else argument)
    raise _unsupported(str(code).lower())  # a construct that a later Python adds


def _anchor_name(anchor: Any) -> str:
    if anchor in _BOUNDARIES:
        return f"{_BOUNDARIES[anchor]} (a word boundary)"
    return f"{(_START_ANCHORS | _END_ANCHORS)[anchor]} (an anchor) inside the pattern"


@functools.lru_cache(maxsize=1024)
def char_set(node: Chars) -> CharSet:
    """The characters of a literal or a class, less the surrogates, which no output can hold; at least one."""
    chars = _python_set(node.code, node.argument) & ANY_CHAR
    if not chars:
        raise RegexError("regex has a class without characters, which nothing can match.")
    return chars


def _python_set(code: Any, argument: Any) -> CharSet:
    if code is op.ANY:
        return NOT_NEWLINE
    if code is op.LITERAL:
        return _single(argument)
    if code is op.NOT_LITERAL:
        return ~_single(argument)
    if code is op.RANGE:
        return CharSet.of((argument[0], argument[1] + 1))
    if code is op.CATEGORY:
        return python_class(_CATEGORIES[argument])
    assert code is op.IN
    negated = argument[0][0] is op.NEGATE
    chars = union(_python_set(*item) for item in argument[negated:])
    return ~chars if negated else chars


def _single(code_point: int) -> CharSet:
    return CharSet.of((code_point, code_point + 1))


def _unsupported(what: str) -> RegexError:
    return RegexError(f"regex uses {what}, which constrained decoding does not support.")


def _too_deep() -> RegexError:
    return RegexError(f"regex is nested too deeply; at most {MAX_DEPTH} levels are served.")
