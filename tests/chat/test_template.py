from __future__ import annotations

from datetime import datetime

import pytest

from etude.chat import ChatTemplate
from etude.errors import ChatError, ConfigError
from etude.records import Message, ToolCall
from tests.chat.made import CHATML

HI = [Message("user", "Hi")]


def test_a_conversation_is_rendered_up_to_where_the_assistant_speaks() -> None:
    template = ChatTemplate(CHATML)
    assert template.render(HI) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(HI, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"
    assert template.render(
        [{"role": "user", "content": "Hi", "name": None}], add_generation_prompt=False
    ) == template.render(HI, add_generation_prompt=False)


def test_special_tokens_tools_and_variables_reach_the_template() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{{ tools | tojson }}{{ mood }}{{ documents is none }}", {"bos_token": "<s>"}
    )
    assert template.render(HI, [{"a": "<é>"}], mood="glad") == '<s>[{"a": "<é>"}]gladTrue'
    assert template.render(HI) == "<s>nullTrue"
    assert template.render(HI, bos_token="<b>") == "<b>nullTrue"


def test_the_language_of_published_templates_is_supported() -> None:
    source = """
    {%- for m in messages %}
        {%- if loop.index0 == 1 %}{% break %}{% endif %}
        {% generation %}{% set x = 1 %}{{ m.content }}{% endgeneration %}
    {% endfor %}
    {{- x is defined }}|{{ strftime_now('%Y') }}|{{ dict(a=1).a }}|{{ dict.fromkeys('b')['b'] }}
    {%- set n = namespace(v=1) %}{% set n.v = 2 %}|{{ n.v }}|{{ {'b': 1, 'a': [1]} | tojson(indent=1, sort_keys=1) }}"""
    year = datetime.now().year
    assert ChatTemplate(source).render(HI) == f'HiFalse|{year}|1|None|2|{{\n "a": [\n  1\n ],\n "b": 1\n}}'


@pytest.mark.parametrize(
    "escape",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ dict.mro }}{{ dict.__class__() }}",
        "{% set n = namespace(__class__=1) %}",
        "{% set n = namespace(_a=1) %}",
        "{% set n = namespace() %}{% set n._a = 1 %}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_template_is_kept_in_its_sandbox(escape: str) -> None:
    with pytest.raises(ChatError, match="refused a conversation"):
        ChatTemplate(escape).render(HI)


def test_a_template_that_raises_is_reported() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ChatError, match=r"messages: user, user\): roles must alternate\. Change the conversation"):
        template.render([*HI, {"role": "user", "content": "?"}])
    with pytest.raises(ChatError, match=r"messages: user\): can only concatenate str"):
        ChatTemplate("{{ messages[0].content + 1 }}").render(HI)
    with pytest.raises(ChatError, match="the roles of its messages: none"):
        ChatTemplate("{{ messages[0].role.x }}").render([])


def test_an_invalid_template_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"not valid jinja: .* \(line 2\)"):
        ChatTemplate("a\n{% if %}")


def test_messages_take_the_form_that_the_template_reads() -> None:
    parts = ChatTemplate("{% for m in messages %}{{ m.content[0].text }}{% endfor %}")
    assert parts.render(HI) == "Hi"
    call = ToolCall("c", "f", '{"a":  1}')
    messages = [*HI, Message("assistant", "", tool_calls=(call,))]
    loop = "{% for m in messages %}{% for c in m.tool_calls %}[[ARGS]]{% endfor %}{{ m.content }}{% endfor %}"
    as_value = ChatTemplate(loop.replace("[[ARGS]]", "{{ c.function.arguments | tojson }}"))
    as_text = ChatTemplate(loop.replace("[[ARGS]]", "{{ '' + c.function.arguments }}"))
    assert as_value.render(messages) == 'Hi{"a": 1}'
    assert as_text.render(messages) == 'Hi{"a":  1}'


def test_reasoning_has_every_name_that_templates_read() -> None:
    source = "{% for m in messages %}{{ m.thinking }}/{{ m.reasoning_content }}{% endfor %}"
    assert ChatTemplate(source).render([Message("assistant", "", reasoning="hm")]) == "hm/hm"
    assert ChatTemplate(source).render([{"role": "assistant", "content": "", "reasoning": "hm"}]) == "hm/hm"
    assert ChatTemplate("{{ 'thinking' in messages[0] }}").render(HI) == "False"
