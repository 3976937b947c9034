"""A chat template is a stranger's program: parsing computes nothing, and faults of rendering are refused in words."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from torchwright.core.errors import ModelError
from torchwright.hub.chat_template import ChatTemplate, TemplateRefused

HELLO = [{"role": "user", "content": "hi"}]


def template(folder: Path, source: str) -> ChatTemplate:
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    return ChatTemplate(folder)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 200000000 }}",
        "{% set x = 'a' * 200000000 %}",
        "{{ 'a' | center(200000000) }}",
        "{% if ('a' | center(200000000)) | length %}x{% endif %}",
        "{{ 7 ** 80000000 }}",
        "{% for x in [0] * 200000000 %}{% endfor %}",
    ],
)
def test_parsing_computes_no_constant(tmp_path: Path, source: str) -> None:
    tracemalloc.start()
    try:
        template(tmp_path, source)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("source", ["{{ 'a' * 200000000 }}", "{{ [0] * 20000000 }}", "{{ 7 ** 80000000 }}"])
def test_an_operator_makes_no_result_of_any_size(tmp_path: Path, source: str) -> None:
    with pytest.raises(TemplateRefused, match="10,000,000"):
        template(tmp_path, source).render(HELLO)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("a\nb{{ 1 / 0 }}", "line 2: ZeroDivisionError"),
        ("a\n\n{{ messages.pop(9) }}", "messages"),
        ("{{ messages[0].content.index('z') }}", "line 1: ValueError"),
        ("\n{{ '%d' % 'x' }}", "line 2: TypeError"),
        ("\n{{ 'x'.encode('no-such') }}", "line 2: LookupError"),
        ("\n{{ 1.5.hex().nothing() }}", "no attribute"),
        ("{{ (10 ** 400) * 1.5 }}", "line 1: OverflowError"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "cannot take these messages"),
    ],
)
def test_a_fault_within_a_template_is_refused_with_its_line(tmp_path: Path, source: str, words: str) -> None:
    with pytest.raises(TemplateRefused) as found:
        template(tmp_path, source).render(HELLO)
    assert words in found.value.summary


@pytest.mark.parametrize(
    "source",
    [
        "{% autoescape 'a' | center(200000000) %}x{% endautoescape %}",
        "{% if %}",
        "{{ " + "(" * 5000,
        "{% include 'x' %}",
    ],
)
def test_a_template_that_is_none_is_refused(tmp_path: Path, source: str) -> None:
    with pytest.raises(ModelError):
        template(tmp_path, source).render(HELLO)


def test_what_operators_and_outputs_give_is_unchanged(tmp_path: Path) -> None:
    source = "{{ '-' * 3 }}{{ 2 ** 10 }}{{ none }}{{ 1.5 }}{{ ['a'] * 2 }}{{ '<b>' }}{{ undefined_name }}"
    assert template(tmp_path, source).render(HELLO) == "---1024None1.5['a', 'a']<b>"


def test_unparsed_a_template_is_only_read(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    found = ChatTemplate(tmp_path, parse=False)
    assert not found.plain
    with pytest.raises(TemplateRefused, match="cannot be parsed"):
        found.render(HELLO)
