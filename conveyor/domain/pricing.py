"""Pricing: what a page costs at a ZenRows-compatible gateway, in credits (docs/api.md, Dry run).

A page that is fetched once and well. What failed costs nothing there, so tries do not count.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

_PLAIN, _RENDERED, _PREMIUM, _BOTH = 1, 5, 10, 25


class Price(msgspec.Struct, frozen=True):
    """At least and at most; the same where the gateway decides nothing by itself."""

    credits_min: int = 0
    credits_max: int = 0

    def __add__(self, other: Price) -> Price:
        return Price(self.credits_min + other.credits_min, self.credits_max + other.credits_max)


FREE = Price()


def price_of(params: Mapping[str, str]) -> Price:
    """What one page with these parameters costs."""
    if params.get("mode") == "auto":
        return Price(_PLAIN, _BOTH)
    is_rendered = params.get("js_render", "").lower() == "true"
    is_premium = params.get("premium_proxy", "").lower() == "true"
    price = {
        (False, False): _PLAIN,
        (True, False): _RENDERED,
        (False, True): _PREMIUM,
        (True, True): _BOTH,
    }[is_rendered, is_premium]
    return Price(price, price)
