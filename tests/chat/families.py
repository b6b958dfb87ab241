"""Small templates in the form of model families whose own templates no package carries."""

from __future__ import annotations

_ASKED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% else %}"
    "{% for call in m.tool_calls or [] %}{% if call.id is not string or call.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}{% endfor %}"
)
MISTRAL_LIST = (
    _ASKED + "{% if m.tool_calls %}[TOOL_CALLS] [{% for call in m.tool_calls %}{% if not loop.first %}, {% endif %}"
    """{{ (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{% endfor %}]"""
    "{% else %}{{ m.content }}{% endif %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Mistral 7B v0.3 and similar models: a list of calls in place of an answer."""
MISTRAL_ARGS = (
    _ASKED + "{{ m.content }}{% for call in m.tool_calls or [] %}[TOOL_CALLS]{{ call.function.name }}[ARGS]"
    "{{ call.function.arguments | tojson }}{% endfor %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Mistral Small 3.2, Magistral, Devstral: calls by their names, after the answer."""
LLAMA4 = (
    "{% macro python(value) %}{{ value | tojson if value is string else value }}{% endmacro %}"
    "{{ bos_token }}{% if tools %}<|header_start|>system<|header_end|>\n\nIf you decide to invoke any function, put it "
    "in the format of [func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]\n"
    "{{ tools | tojson }}<|eot|>{% endif %}{% for m in messages %}"
    "<|header_start|>{{ 'ipython' if m.role == 'tool' else m.role }}<|header_end|>\n\n"
    "{% if m.tool_calls %}<|python_start|>["
    "{% for call in m.tool_calls %}{% if not loop.first %}, {% endif %}{{ call.function.name }}("
    "{% for name, value in call.function.arguments.items() %}{% if not loop.first %}, {% endif %}"
    "{{ name }}={{ python(value) }}{% endfor %}){% endfor %}]<|python_end|>{% else %}{{ m.content }}{% endif %}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|header_start|>assistant<|header_end|>\n\n{% endif %}"
)
"""Llama 4 with the template that asks for calls in Python."""
FAMILIES = {"mistral_list": MISTRAL_LIST, "mistral_args": MISTRAL_ARGS, "llama4": LLAMA4}
FAMILY_ENDS = {"mistral_list": ("</s>",), "mistral_args": ("</s>",), "llama4": ("<|eot|>",)}
