"""Keys that a JSON object names twice."""

from __future__ import annotations

import pytest

from conveyor.domain.submit.scraper_params import find_doubled_key


@pytest.mark.parametrize(
    ("document", "key"),
    [
        ('{"a":1,"a":1}', "a"),
        ('{"a":1,"b":2,"a":3}', "a"),
        (r'{"a":1,"\u0061":2}', "a"),
        ('{"x":{"a":1,"a":2}}', "a"),
        ('[1,[{"b":[{"c":"{\\"d\\":1}","c":null}]}]]', "c"),
        ('{"":0,"":0}', ""),
        ('{"é":0,"\\u00e9":0}', "é"),
    ],
)
def test_a_key_named_twice_is_found_at_any_depth(document: str, key: str) -> None:
    assert find_doubled_key(document) == key
    assert find_doubled_key(document.encode()) == key


@pytest.mark.parametrize(
    "document",
    [
        "1",
        "[]",
        '{"a":1,"A":2}',
        '[{"a":1},{"a":2}]',
        '{"a":{"a":{"a":1}}}',
        '{"a":"{\\"b\\":1,\\"b\\":2}"}',
        f'{{"a":{"9" * 5000}}}',
        '{"a":1e999,"b":-0.5}',
    ],
)
def test_keys_of_different_objects_may_be_equal(document: str) -> None:
    assert find_doubled_key(document) is None
