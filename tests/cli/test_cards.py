"""The card of a model, from what /api/show gives."""

from __future__ import annotations

from localrun.cli.models import model_card, model_parameters

SHOWN = {
    "details": {"family": "llama", "parameter_size": "2.4M", "quantization_level": "Q8_0"},
    "model_info": {"general.architecture": "llama", "llama.context_length": 4096},
    "capabilities": ["completion", "tools"],
    "parameters": 'temperature 0.7\nstop "x"',
    "license": "\n".join(f"line {n}" for n in range(50)),
}


def test_the_card_shows_what_there_is_and_no_empty_block():
    card = model_card(SHOWN)
    assert "  architecture        llama\n" in card
    assert "  context length      4096\n" in card
    assert "Capabilities\n  completion\n  tools" in card
    assert "line 2" in card
    assert "line 3" not in card
    assert "System" not in card
    assert "embedding" not in card


def test_the_card_names_the_draft_model():
    assert "  draft model         small\n" in model_card(SHOWN | {"localrun": {"draft": "small"}})


def test_the_card_describes_the_projector_or_says_why_there_is_none():
    projector = {
        "path": "/there/mmproj.gguf", "size": 851_000_000, "takes": ["vision", "audio"],
        "types": ["qwen2.5vl_merger", "qwen2a"], "quantization": "F16",
    }  # fmt: skip
    card = model_card(SHOWN | {"localrun": {"projector": projector}})
    assert (
        "Projector\n"
        "  takes               vision, audio\n"
        "  type                qwen2.5vl_merger, qwen2a F16, 851 MB\n"
        "  file                /there/mmproj.gguf\n"
    ) in card
    gone = model_card({"localrun": {"projector": None, "no_projector": "it is gone"}})
    assert "Projector\n  none: it is gone" in gone
    assert "Projector" not in model_card({"localrun": {"projector": None, "no_projector": ""}})


def test_the_card_shows_how_the_model_is_loaded():
    card = model_card(SHOWN | {"localrun": {"load": {"num_ctx": 8192, "kv_type": "q8_0"}}})
    assert "Load settings\n  num_ctx             8192\n  kv_type             q8_0" in card


def test_a_bare_answer_is_no_error():
    assert model_card({"details": None, "model_info": None, "capabilities": None}) == ""


def test_a_hostile_file_cannot_reach_the_terminal():
    assert "\x1b" not in model_card({"license": "\x1b[2J", "details": {"parameter_size": "\x1bc"}})


def test_parameters_of_the_model_and_of_the_conversation():
    shown = model_parameters(SHOWN, {"seed": 3})
    assert shown.index("temperature 0.7") < shown.index("Set here") < shown.index("seed")
    assert model_parameters({}, {}) == "no parameters are set"


def test_a_model_of_another_program_has_the_source_that_list_shows():
    card = model_card({"localrun": {"source": {"kind": "foreign", "repo": "Ollama", "file": "/there"}}})
    assert "  source              Ollama\n" in f"{card}\n"
    hub = model_card({"localrun": {"source": {"kind": "hub", "repo": "a/b", "revision": "c" * 40}}})
    assert f"hub a/b {'c' * 12}" in hub


def test_adapters_of_the_settings_file_and_why_there_are_none():
    load = {"num_ctx": 512, "adapters": ["style", "terse=0.5"]}
    card = model_card({"localrun": {"adapters": ["/a/style.gguf"], "no_adapters": "", "load": load}})
    assert "Adapters\n  /a/style.gguf\n\n" in card
    assert f"  {'adapters':<20}style,terse=0.5" in card
    gone = model_card({"localrun": {"adapters": [], "no_adapters": "the adapter 'style' is not here", "load": load}})
    assert "Adapters\n  none: the adapter 'style' is not here" in gone
