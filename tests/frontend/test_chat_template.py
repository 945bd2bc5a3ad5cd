"""Chat templates come with a model: they format messages, and reach nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stages.v0_1_genesis.hf_transformers_utils import get_tokenizer
from stages.v0_1_genesis.support import chat_template
from stages.v0_1_genesis.support.chat_template import ChatTemplate, ChatTemplateError

from .conftest import FakeServer
from .tiny_tokenizers import write_folder

MESSAGES = [{"role": "user", "content": "hi <b>"}, {"role": "assistant", "content": "ho"}]


def render(source: str, **tokens: str) -> str:
    return ChatTemplate(source, tokens).render(MESSAGES)


def test_what_hugging_face_templates_use_is_there() -> None:
    loop = (
        "{% for m in messages %}\n  {% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% endfor %}"
    )
    assert render("{{ bos_token }}" + loop, bos_token="<s>") == "<s>ho"
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "hi <b>"}'
    assert render("{{ strftime_now('%Y') | length }}") == "4"
    assert render("{{ messages[0].content.split(' ')[0] | trim | upper }}") == "HI"
    assert render("{% if add_generation_prompt %}go{% endif %}{% if tools %}no{% endif %}") == "go"
    count = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
    )
    assert render(count) == "2"


HOSTILE = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__['json'] }}",
    "init": "{{ cycler.__init__.__globals__.os.popen('touch /tmp/strata-owned').read() }}",
    "attr filter": "{{ ''|attr('__class__')|attr('__mro__') }}",
    "format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "import": "{% import 'os' as os %}{{ os }}",
    "mutation": "{{ messages.append({'role': 'x'}) }}",
    "clear": "{% set _ = messages.clear() %}",
    "endless range": "{% for i in range(10 ** 9) %}x{% endfor %}",
    "huge output": "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "division": "{{ 1 // 0 }}",
    "wrong type": "{{ messages[0] + 1 }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_gets_nowhere(name: str) -> None:
    messages: list[dict[str, Any]] = [dict(message) for message in MESSAGES]
    with pytest.raises(ChatTemplateError):
        shown = ChatTemplate(HOSTILE[name], {}).render(messages)
        # Jinja gives an undefined value, which shows as nothing, for some unsafe names.
        raise ChatTemplateError("harmless") if shown == "" else AssertionError(shown)
    assert messages == MESSAGES
    assert not Path("/tmp/strata-owned").exists()


def test_what_a_template_refuses_is_told_in_its_own_words() -> None:
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ChatTemplateError, match="does not compile"):
        render("{% for %}")


def test_messages_are_data_and_never_run_as_a_template() -> None:
    messages = [{"role": "user", "content": "{{ 7 * 7 }}{% raw %}"}]
    assert ChatTemplate("{{ messages[0].content }}", {}).render(messages) == "{{ 7 * 7 }}{% raw %}"


def test_the_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARACTERS", 10)
    with pytest.raises(ChatTemplateError, match="10 characters"):
        ChatTemplate("{{ messages[0].content }}", {}).render([{"role": "user", "content": "x" * 11}])


@pytest.mark.parametrize("where", ["tokenizer_config", "list", "file"])
def test_the_template_is_found_where_folders_keep_it(tmp_path: Path, where: str) -> None:
    source: Any = "{{ bos_token }}{{ messages[0].content }}"
    if where == "list":
        source = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": source}]
    write_folder(tmp_path, chat_template=source if where != "file" else "no")
    if where == "file":
        (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    tokenizer = get_tokenizer(str(tmp_path))
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "the"}])
    # One BOS: the template's own. Tokenizing adds none.
    assert [tokenizer.decode([i], skip_special_tokens=False) for i in ids] == ["<|endoftext|>", "the"]


def test_a_template_that_refuses_or_is_missing_is_a_400(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    for source, said in [("{{ raise_exception('only dogs') }}", "only dogs"), (None, "/v1/completions")]:
        folder = write_folder(tmp_path / str(bool(source)), chat_template=source)
        (folder / "model.safetensors").touch()
        with FakeServer(folder) as server:
            response = server.wait_ready().client.post("/v1/chat/completions", json=body)
            assert response.status_code == 400
            assert said in response.json()["error"]["message"]
            assert response.json()["error"]["param"] == "messages"
