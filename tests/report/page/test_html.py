"""No text can become markup, in elements, attributes and scripts."""

import json

from hypothesis import given
from hypothesis import strategies as st

from megarl.report.page.html import Html, escape, script_json, table, tag
from tests.support.telemetry.html_reader import HtmlReader

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@given(TEXT, TEXT)
def test_a_text_stays_a_text(content: str, attribute: str) -> None:
    reader = HtmlReader(tag("p", content, title=attribute))
    assert [name for name, _ in reader.elements] == ["p"] and set(reader.elements[0][1]) == {"title"}
    printable = content.isprintable() and attribute.isprintable()
    if printable:
        assert reader.text == content and reader.elements[0][1]["title"] == attribute
    assert "\x00" not in reader.text and "\u202e" not in reader.text


@given(st.recursive(TEXT, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3)))
def test_data_cannot_end_its_script(content: object) -> None:
    text = script_json(content)
    assert "<" not in text and ">" not in text and json.loads(text) == content


def test_markup_is_kept_and_control_characters_are_shown() -> None:
    assert tag("b", tag("i", "a"), "<") == "<b><i>a</i>&lt;</b>"
    assert escape("a\x1b[31m\u202e\n\t") == "a␛[31m\\u202e\n\t"
    assert tag("input", type="text", checked=True, disabled=False, class_="x", data_y=1) == (
        '<input type="text" checked class="x" data-y="1">'
    )
    assert isinstance(tag("p"), Html)


def test_a_table_escapes_its_cells() -> None:
    reader = HtmlReader(table(["<a>", "b"], [["<script>", "1"]]))
    assert "<a>" in reader.text and "<script>" in reader.text
    assert [name for name, _ in reader.elements].count("script") == 0
