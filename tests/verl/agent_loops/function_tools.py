"""Tools of the newer kind; verl runs this file."""

import asyncio

from verl.tools.function_tool import function_tool


@function_tool
def double(number: int) -> str:
    """Double a number.

    Args:
        number: a number
    """
    return str(2 * number)


@function_tool("digits")
async def count_digits(number: int) -> tuple[dict, float]:
    """Count the digits of a number.

    Args:
        number: a number
    """
    await asyncio.sleep(0)
    return {"digits": len(str(number))}, 0.5
