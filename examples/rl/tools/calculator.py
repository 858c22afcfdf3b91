"""A calculator: exact arithmetic on a model's expression, with limits on everything that could grow."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from megarl import ToolAnswer

MAX_EXPRESSION = 1_000  # characters
MAX_DEPTH = 50
MAX_BITS = 4_096  # of numerator and of denominator
_CONSTANTS = {"pi": math.pi, "e": math.e}
DIGITS = 12  # of a result that has no short exact form

Number = Fraction | float


class CalculationError(ValueError):
    """An expression that cannot be computed; the message is for the model."""


class Calculator:
    """The tool `calculator`."""

    name = "calculator"
    description = (
        "Compute an arithmetic expression: + - * / // % ** and parentheses, the functions sqrt, abs, round, min, max, "
        "gcd, factorial, floor, ceil, log, log10, log2, exp, sin, cos, tan, and the constants pi and e."
    )
    idempotent = True

    def __init__(self) -> None:
        self.parameters: dict[str, Any] = {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "for example (2 + 3) * 4 / 7"}},
            "required": ["expression"],
        }

    async def call(self, arguments: Mapping[str, Any], *, timeout_s: float) -> ToolAnswer:
        """Compute `arguments["expression"]`; this takes milliseconds, so `timeout_s` is not needed."""
        expression = arguments.get("expression")
        if not isinstance(expression, str):
            return ToolAnswer("error: the calculator needs the argument `expression`, a string", error=True)
        if unknown := sorted(set(arguments) - {"expression"}):
            return ToolAnswer(f"error: the calculator has no argument {unknown[0][:80]!r}", error=True)
        try:
            return ToolAnswer(calculate(expression))
        except CalculationError as error:
            return ToolAnswer(f"error: {error}", error=True)

    async def close(self) -> None:
        """Do nothing: there are no processes."""


def calculate(expression: str) -> str:
    """Return an expression's value as text: exact for whole numbers and short decimals, else rounded.

    Raises CalculationError if it is not an expression, or if a number in it becomes too large.
    """
    text = expression.strip().rstrip("=").replace("^", "**").replace("×", "*").replace("÷", "/").replace("−", "-")
    if not text or len(text) > MAX_EXPRESSION:
        raise CalculationError(f"an expression has 1 to {MAX_EXPRESSION} characters")
    try:
        tree = ast.parse(text.replace("\n", " "), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CalculationError(f"this is not an arithmetic expression: {expression.strip()[:80]}") from error
    try:
        return shown(_value(tree.body, 0))
    except ZeroDivisionError as error:
        raise CalculationError("division by zero") from error
    except OverflowError as error:
        raise CalculationError("a number is too large") from error


def shown(value: Number) -> str:
    """Return a number as text."""
    if isinstance(value, float):
        return f"{value:.{DIGITS}g}"
    if value.denominator == 1:
        return str(value.numerator)
    if _is_short_decimal(value.denominator):
        places = next(count for count in range(DIGITS + 1) if (value * 10**count).denominator == 1)
        digits = f"{abs(int(value * 10**places)):0{places + 1}d}"
        return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"
    try:
        return f"{float(value):.{DIGITS}g} (= {value})" if len(str(value)) <= 30 else f"{float(value):.{DIGITS}g}"
    except OverflowError as error:
        raise CalculationError("a number is too large") from error


def _is_short_decimal(denominator: int) -> bool:
    return 10**DIGITS % denominator == 0


def _value(node: ast.expr, depth: int) -> Number:
    if depth > MAX_DEPTH:
        raise CalculationError(f"more than {MAX_DEPTH} nested operations")
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _checked(_literal(number))
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as sign, operand=operand):
            value = _value(operand, depth + 1)
            return value if isinstance(sign, ast.UAdd) else -value
        case ast.BinOp(left=left, op=operator, right=right):
            return _checked(_binary(operator, _value(left, depth + 1), _value(right, depth + 1)))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _checked(_call(name, [_value(each, depth + 1) for each in args]))
    raise CalculationError(f"the calculator cannot compute {_source(node)}")


def _source(node: ast.expr) -> str:
    """Return the beginning of an expression's text; nodes nested too deeply have none."""
    try:
        return ast.unparse(node)[:80]
    except RecursionError:
        return "an expression nested so deeply"


def _literal(number: float) -> Number:
    """Return a number exactly as written: 0.1 is one tenth."""
    if isinstance(number, float) and not math.isfinite(number):
        raise CalculationError("a number is too large")
    return Fraction(repr(number)) if isinstance(number, float) else _checked(Fraction(number))


def _checked(value: Number) -> Number:
    """Return the value; raises CalculationError if it is too large or not a number."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise CalculationError("the result is not a finite number")
    elif max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise CalculationError("a number is too large")
    return value


def _binary(operator: ast.operator, left: Number, right: Number) -> Number:
    compute = _OPERATORS.get(type(operator))
    if compute is None:
        raise CalculationError("the calculator has the operators + - * / // % and **")
    return compute(left, right)


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if abs(exponent.numerator) * bits > MAX_BITS and base not in (-1, 0, 1):
            raise CalculationError("a number is too large")
        if base in (-1, 1):
            return base if exponent.numerator % 2 else Fraction(1)
        return base ** int(exponent)
    power: complex = float(base) ** float(exponent)
    if isinstance(power, complex):
        raise CalculationError("a root of a negative number")
    return float(power)


def _factorial(number: Number) -> Fraction:
    if number < 0 or number != int(number) or number > 500:
        raise CalculationError("factorial takes whole numbers from 0 to 500")
    return Fraction(math.factorial(int(number)))


def _sqrt(number: Number) -> Number:
    if number < 0:
        raise CalculationError("a root of a negative number")
    if isinstance(number, Fraction):
        roots = math.isqrt(number.numerator), math.isqrt(number.denominator)
        if Fraction(*roots) ** 2 == number:
            return Fraction(*roots)
    return math.sqrt(number)


def _gcd(*numbers: Number) -> Fraction:
    if any(number != int(number) for number in numbers):
        raise CalculationError("gcd takes whole numbers")
    return Fraction(math.gcd(*(int(number) for number in numbers)))


def _round(number: Number, places: Number = Fraction(0)) -> Fraction:
    if places != int(places) or not -50 <= int(places) <= 50:
        raise CalculationError("round takes at most 50 places")
    return Fraction(round(Fraction(number), int(places)))


_OPERATORS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.Div: lambda left, right: left / right,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: lambda left, right: left % right,
    ast.Pow: _power,
}
_FUNCTIONS: dict[str, Callable[..., Number]] = {
    "sqrt": _sqrt,
    "abs": abs,
    "round": _round,
    "min": min,
    "max": max,
    "gcd": _gcd,
    "factorial": _factorial,
    "floor": lambda number: Fraction(math.floor(number)),
    "ceil": lambda number: Fraction(math.ceil(number)),
    "log": math.log,
    "ln": math.log,
    "log10": math.log10,
    "log2": math.log2,
    "exp": math.exp,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
}


def _call(name: str, arguments: list[Number]) -> Number:
    try:
        return _FUNCTIONS[name](*arguments)
    except (TypeError, ValueError) as error:
        if isinstance(error, CalculationError):
            raise
        raise CalculationError(
            f"{name} cannot be computed for {', '.join(map(shown, arguments)) or 'nothing'}"
        ) from error
