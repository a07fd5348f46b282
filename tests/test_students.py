"""Recipes build what they name, and a warm-started student is a bit-equal, independent copy of the chosen layers."""

import pickle
import random
import re
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from jsonargparse import ArgumentParser
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForMaskedLM, PreTrainedTokenizerFast

from foundry_lightning.students import (
    FromBuilder,
    FromConfig,
    FromPretrained,
    StudentRecipe,
    WarmStart,
    warm_start_student,
)

V = 50
SIZES = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "vocab_size": V, "pad_token_id": 1}
WIDE = {**SIZES, "intermediate_size": 24, "max_position_embeddings": 40}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": WIDE,
    "roberta": WIDE,
    "xlm-roberta": WIDE,
    "electra": {**WIDE, "embedding_size": 12},
    "mpnet": WIDE,
    "deberta-v2": {
        **WIDE,
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "position_buckets": 8,
        "norm_rel_ebd": "layer_norm",
        "conv_kernel_size": 3,
        "conv_act": "gelu",
    },
    "distilbert": {**SIZES, "hidden_dim": 24, "max_position_embeddings": 40},
    "modernbert": {**WIDE, "local_attention": 4},
}
IDS = torch.arange(2, 26).reshape(2, 12)
LAYER = re.compile(r"(layers?)\.(\d+)\.")


def make_teacher(model_type: str, **changes: Any) -> Any:
    teacher = FromConfig(model_type, {**FAMILIES[model_type], **changes}).build().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # biases and norms start at 0 and 1: noise makes every tensor count
        for parameter in teacher.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return teacher


def make_tokenizer(words: int = 20, **special: str) -> PreTrainedTokenizerFast:
    special = special or {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "mask", "pad", "cls", "sep")}
    names = [*special.values(), *(f"w{number}" for number in range(words))]
    backend = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token=names[0]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


@torch.no_grad()
def scores(model: nn.Module, ids: Tensor = IDS) -> Tensor:
    logits: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return logits


def generator_states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())


def bert_builder(vocab_size: int, hidden_size: int = 16) -> nn.Module:
    return nn.Sequential(nn.Embedding(vocab_size, hidden_size), nn.Linear(hidden_size, vocab_size))


def tokenizer_builder(tokenizer: Any = None) -> nn.Module:
    return nn.Linear(1, 1 if tokenizer is None else len(tokenizer))


def number_builder() -> int:
    return 3


# warm_start_student


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_tensor_of_the_student_is_an_unaliased_copy_of_the_teachers(model_type: str) -> None:
    teacher = make_teacher(model_type)
    student = warm_start_student(teacher, layers=[0, 2])
    taught = teacher.state_dict()
    addresses = {tensor.data_ptr() for tensor in taught.values()}
    for name, tensor in student.state_dict().items():
        source = LAYER.sub(lambda match: f"{match[1]}.{[0, 2][int(match[2])]}.", name)
        assert torch.equal(tensor, taught[source]), name
        assert tensor.data_ptr() not in addresses, name
    assert type(student) is type(teacher)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_student_of_the_same_depth_gives_the_teachers_scores(model_type: str) -> None:
    teacher = make_teacher(model_type)
    assert torch.equal(scores(warm_start_student(teacher, 4)), scores(teacher))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_shallower_student_survives_saving_and_loading(model_type: str, tmp_path: Path) -> None:
    teacher = make_teacher(model_type)
    student: Any = warm_start_student(teacher, 2)
    student.save_pretrained(tmp_path)
    loaded, info = AutoModelForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.config.num_hidden_layers == 2
    assert torch.equal(scores(loaded), scores(student))
    assert not torch.equal(scores(student), scores(teacher))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_training_the_student_leaves_the_teacher_as_it_was(model_type: str) -> None:
    teacher = make_teacher(model_type).requires_grad_(False).train()
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    settings = teacher.config.to_dict()
    generators = generator_states()
    student = warm_start_student(teacher, 2)
    assert generator_states() == generators
    assert not student.training
    student(input_ids=IDS).logits.square().sum().backward()
    torch.optim.SGD(student.parameters(), lr=1.0).step()
    assert all(parameter.requires_grad for parameter in student.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())
    assert teacher.config.to_dict() == settings
    assert teacher.training
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in teacher.parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_stay_tied_and_untied_ones_untied(tied: bool) -> None:
    student: Any = warm_start_student(make_teacher("bert", tie_word_embeddings=tied), 2)
    assert (student.get_input_embeddings().weight is student.get_output_embeddings().weight) is tied


def test_the_student_has_the_teachers_type_and_attention() -> None:
    teacher = make_teacher("modernbert").to(torch.bfloat16)
    teacher.set_attn_implementation("eager")
    student: Any = warm_start_student(teacher, 4)
    assert {parameter.dtype for parameter in student.parameters()} == {torch.bfloat16}
    assert student.config._attn_implementation == "eager"
    assert torch.equal(scores(student), scores(teacher))


def test_resized_embeddings_are_copied_as_they_are() -> None:
    teacher = make_teacher("roberta")
    teacher.resize_token_embeddings(V + 14)
    assert torch.equal(scores(warm_start_student(teacher, 4), IDS + 38), scores(teacher, IDS + 38))


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [(6, [0, 2, 4, 7, 9, 11]), (4, [0, 4, 7, 11]), (3, [0, 6, 11]), (2, [0, 11]), (1, [0]), (12, list(range(12)))],
)
def test_default_layers_are_evenly_spaced_with_the_first_and_the_last(num_layers: int, expected: list[int]) -> None:
    teacher = make_teacher("bert", num_hidden_layers=12)
    student: Any = warm_start_student(teacher, num_layers)
    assert len(student.bert.encoder.layer) == len(expected)
    for layer, number in zip(student.bert.encoder.layer, expected, strict=True):
        weight = teacher.bert.encoder.layer[number].output.dense.weight
        assert torch.equal(layer.output.dense.weight, weight)


def test_modernbert_attention_types_follow_the_chosen_layers() -> None:
    teacher = make_teacher("modernbert", num_hidden_layers=6)
    assert teacher.config.layer_types == (["full_attention"] + ["sliding_attention"] * 2) * 2
    student: Any = warm_start_student(teacher, layers=[0, 2, 3])
    assert student.config.layer_types == ["full_attention", "sliding_attention", "full_attention"]
    assert [layer.attention_type for layer in student.model.layers] == student.config.layer_types


def test_modernbert_layers_must_begin_with_layer_0() -> None:
    with pytest.raises(ValueError, match=r"layers \[1, 2\].*attn_norm"):
        warm_start_student(make_teacher("modernbert"), layers=[1, 2])


def test_albert_is_refused_because_its_layers_share_weights() -> None:
    albert = FromConfig("albert", {**WIDE, "embedding_size": 12}).build()
    with pytest.raises(ValueError, match="AlbertForMaskedLM.*4 layers share the weights of 1 group"):
        warm_start_student(albert, 2)


def test_models_without_a_list_of_layers_are_refused() -> None:
    funnel = FromConfig("funnel", {"d_model": 16, "vocab_size": V, "n_head": 2, "d_head": 8, "d_inner": 16}).build()
    with pytest.raises(ValueError, match="FunnelForMaskedLM.*layers in blocks"):
        warm_start_student(funnel, 2)
    sizes = {"d_model": 16, "vocab_size": V, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 16}
    bart = FromConfig("bart", {**sizes, "decoder_ffn_dim": 16}).build()
    with pytest.raises(ValueError, match="an encoder and a decoder"):
        warm_start_student(bart, 1)


def test_a_teacher_whose_weights_do_not_match_its_config_is_refused() -> None:
    teacher = make_teacher("bert")
    teacher.bert.embeddings.position_embeddings = nn.Embedding(60, 16)
    with pytest.raises(ValueError, match=r"position_embeddings\.weight.*another shape"):
        warm_start_student(teacher, 2)


def test_a_model_that_is_not_of_transformers_is_refused() -> None:
    with pytest.raises(TypeError, match="teacher must be a transformers PreTrainedModel, got Sequential"):
        warm_start_student(nn.Sequential(make_teacher("bert")), 2)


@pytest.mark.parametrize(
    ("num_layers", "layers", "problem"),
    [
        (None, None, "num_layers or layers, and not both"),
        (2, [0, 1], "num_layers or layers, and not both"),
        (0, None, "num_layers must lie from 1 to 4.*got 0"),
        (5, None, "num_layers must lie from 1 to 4.*got 5"),
        (None, [], r"at least one.*got \[\]"),
        (None, [0, 4], r"from 0 to 3.*got \[0, 4\]"),
        (None, [-1, 2], r"from 0 to 3.*got \[-1, 2\]"),
        (None, [0, 1, 1], r"none twice.*got \[0, 1, 1\]"),
        (None, [2, 0], r"strictly increasing.*got \[2, 0\]"),
    ],
)
def test_a_wrong_choice_of_layers_is_refused(num_layers: int | None, layers: list[int] | None, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        warm_start_student(make_teacher("bert"), num_layers, layers)


# BERT into DistilBERT


@pytest.mark.parametrize("tied", [True, False])
def test_a_distilbert_of_the_same_depth_gives_the_bert_teachers_scores(tied: bool, tmp_path: Path) -> None:
    teacher = make_teacher("bert", tie_word_embeddings=tied)
    student: Any = warm_start_student(teacher, 4, student_type="distilbert")
    torch.testing.assert_close(scores(student), scores(teacher), atol=1e-5, rtol=1e-5)
    assert student.config.model_type == "distilbert"
    assert (student.vocab_projector.weight is student.get_input_embeddings().weight) is tied
    student.save_pretrained(tmp_path)
    assert torch.equal(scores(AutoModelForMaskedLM.from_pretrained(tmp_path)), scores(student))


def test_a_shallower_distilbert_copies_the_chosen_layers_and_no_memory() -> None:
    teacher = make_teacher("bert")
    teacher.set_attn_implementation("eager")
    student: Any = warm_start_student(teacher, layers=[1, 3], student_type="distilbert")
    assert student.config._attn_implementation == "eager"
    same_class: Any = warm_start_student(teacher, layers=[1, 3])
    torch.testing.assert_close(scores(student), scores(same_class), atol=1e-5, rtol=1e-5)
    query = student.distilbert.transformer.layer[1].attention.q_lin.weight
    assert torch.equal(query, teacher.bert.encoder.layer[3].attention.self.query.weight)
    addresses = {tensor.data_ptr() for tensor in teacher.parameters()}
    assert not addresses & {tensor.data_ptr() for tensor in student.parameters()}
    assert all(parameter.requires_grad for parameter in student.parameters())


@pytest.mark.parametrize(("model_type", "student_type"), [("roberta", "distilbert"), ("bert", "roberta")])
def test_other_changes_of_type_are_refused(model_type: str, student_type: str) -> None:
    with pytest.raises(ValueError, match=f"student_type must be '{model_type}'.*got '{student_type}'"):
        warm_start_student(make_teacher(model_type), 2, student_type=student_type)


def test_a_distilbert_needs_a_teacher_with_the_masked_lm_head() -> None:
    with pytest.raises(ValueError, match="needs a teacher with BERT's masked-LM head, got BertModel"):
        warm_start_student(make_teacher("bert").bert, 2, student_type="distilbert")


# FromConfig


def test_vocabulary_and_special_ids_come_from_the_tokenizer() -> None:
    tokenizer = make_tokenizer()
    sizes = {name: value for name, value in WIDE.items() if name not in ("vocab_size", "pad_token_id")}
    student: Any = FromConfig("modernbert", sizes).build(tokenizer)
    ids = [student.config.mask_token_id, student.config.pad_token_id, student.config.cls_token_id]
    assert [*ids, student.config.sep_token_id] == [1, 2, 3, 4]
    assert student.config.bos_token_id is None  # the architecture's default means nothing to this tokenizer
    assert student.config.vocab_size == len(tokenizer) == 25
    assert student.get_input_embeddings().padding_idx == 2


def test_a_named_setting_wins_over_the_tokenizer() -> None:
    student: Any = FromConfig("bert", {**WIDE, "pad_token_id": 0, "mask_token_id": 7}).build(make_tokenizer())
    assert (student.config.vocab_size, student.config.pad_token_id, student.config.mask_token_id) == (V, 0, 7)


def test_the_vocabulary_is_padded_to_the_multiple_and_only_when_not_named() -> None:
    sizes = {name: value for name, value in WIDE.items() if name != "vocab_size"}
    padded: Any = FromConfig("bert", sizes, pad_vocab_to_multiple_of=8).build(make_tokenizer())
    named: Any = FromConfig("bert", WIDE, pad_vocab_to_multiple_of=8).build(make_tokenizer())
    assert (padded.config.vocab_size, named.config.vocab_size) == (32, V)


def test_the_seed_alone_decides_the_weights() -> None:
    first, second, third = (FromConfig("bert", WIDE, seed=seed).build().state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    name = "bert.encoder.layer.0.output.dense.weight"
    assert not torch.equal(first[name], third[name])


def test_the_weights_do_not_depend_on_the_device_context() -> None:
    expected = FromConfig("bert", WIDE).build().state_dict()
    with torch.device("meta"):  # as Lightning calls configure_model, there with the accelerator
        student = FromConfig("bert", WIDE).build().state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in student.items())


def test_settings_that_only_the_models_code_reads_are_accepted() -> None:
    deberta: Any = FromConfig("deberta-v2", FAMILIES["deberta-v2"]).build()
    assert deberta.deberta.encoder.conv is not None
    modernbert: Any = FromConfig("modernbert", {**WIDE, "global_attn_every_n_layers": 2}).build()
    assert modernbert.config.layer_types == ["full_attention", "sliding_attention"] * 2
    eager: Any = FromConfig("bert", {**WIDE, "model_type": "bert", "attn_implementation": "eager"}).build()
    assert eager.config._attn_implementation == "eager"


def test_the_recipe_keeps_its_settings_apart_from_the_model() -> None:
    recipe = FromConfig("modernbert", {**WIDE, "layer_types": ["full_attention"] * 4})
    first: Any = recipe.build()
    first.config.layer_types[0] = "sliding_attention"
    second: Any = recipe.build()
    assert second.config.layer_types == ["full_attention"] * 4


@pytest.mark.parametrize(
    ("model_type", "config", "problem"),
    [
        ("bret", {}, "model_type 'bret' is not known.*closest: '.*bert'"),
        ("gpt2", {}, "model_type 'gpt2' has no masked-LM class"),
        ("modernvbert", {}, "model_type 'modernvbert' has no vocab_size of its own"),
        ("bert", {"hidden_sise": 16}, "config names 'hidden_sise'.*BertConfig.*closest: 'hidden_size'"),
        ("bert", {"model_type": "roberta"}, "model_type 'roberta', but the recipe's model_type is 'bert'"),
        ("bert", {"vocab_size": 10}, "vocab_size 10, but the tokenizer has 25 ids"),
        ("bert", {"hidden_size": "wide"}, "config does not fit BertConfig.*hidden_size"),
        ("bert", {**WIDE, "pad_token_id": 50}, "pad_token_id must lie below vocab_size 50, got 50"),
    ],
)
def test_a_config_that_cannot_work_is_refused(model_type: str, config: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        FromConfig(model_type, config).build(make_tokenizer())


def test_a_multiple_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="pad_vocab_to_multiple_of must be at least 1, got 0"):
        FromConfig(pad_vocab_to_multiple_of=0)


# FromPretrained


@pytest.mark.parametrize("torch_dtype", ["float32", "bfloat16"])
def test_a_folder_is_loaded_in_the_asked_type(torch_dtype: Any, tmp_path: Path) -> None:
    teacher = make_teacher("bert")
    teacher.half().save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = FromPretrained(str(tmp_path), torch_dtype).build()
    assert {parameter.dtype for parameter in loaded.parameters()} == {getattr(torch, torch_dtype)}
    expected = teacher.state_dict()["bert.embeddings.word_embeddings.weight"].to(getattr(torch, torch_dtype))
    assert torch.equal(loaded.state_dict()["bert.embeddings.word_embeddings.weight"], expected)


def test_a_head_that_the_folder_does_not_hold_is_new_and_said_once(tmp_path: Path) -> None:
    AutoModel.from_config(make_teacher("bert").config).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"holds no weights for cls\.predictions.*starts new") as told:
        first = FromPretrained(str(tmp_path)).build()
    assert len(told) == 1
    with pytest.warns(UserWarning, match="starts new"):
        second = FromPretrained(str(tmp_path)).build()
    name = "cls.predictions.transform.dense.weight"
    assert torch.equal(first.state_dict()[name], second.state_dict()[name])


def test_a_folder_that_lacks_weights_of_the_encoder_is_refused(tmp_path: Path) -> None:
    teacher = make_teacher("bert")
    teacher.config.num_hidden_layers = 5
    teacher.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lacks 16 tensors of the encoder \(bert\.encoder\.layer\.4"):
        FromPretrained(str(tmp_path)).build()


def test_a_folder_is_loaded_within_another_device_context(tmp_path: Path) -> None:
    teacher = make_teacher("bert")
    teacher.save_pretrained(tmp_path)
    with torch.device("meta"):
        loaded = FromPretrained(str(tmp_path)).build()
    assert torch.equal(scores(loaded), scores(teacher))


def test_a_path_that_does_not_exist_or_holds_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere' is not a folder"):
        FromPretrained(str(tmp_path / "nowhere")).build()
    with pytest.raises(FileNotFoundError, match=r"holds no config\.json"):
        FromPretrained(str(tmp_path)).build()
    make_teacher("bert").config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"could not be loaded as a masked language model \(the folder\)"):
        FromPretrained(str(tmp_path)).build()
    (tmp_path / "model.safetensors").write_bytes(b"damaged file")
    with pytest.raises(ValueError, match=r"could not be loaded as a masked language model \(the folder\)"):
        FromPretrained(str(tmp_path)).build()


def test_a_hub_name_that_cannot_be_reached_is_named_in_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="path 'nobody/no-such-model' could not be loaded.*no folder here") as caught:
        FromPretrained("nobody/no-such-model").build()
    assert "\n" not in str(caught.value)


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(ValueError, match="torch_dtype must be float32, bfloat16 or float16, got 'int8'"):
        FromPretrained("folder", "int8")  # type: ignore[arg-type]


# FromBuilder


@pytest.mark.parametrize("path", [f"{__name__}:bert_builder", f"{__name__}.bert_builder"])
def test_a_builder_gets_the_vocabulary_size_it_asks_for(path: str) -> None:
    assert FromBuilder(path).build(make_tokenizer()).get_submodule("1").out_features == 25  # type: ignore[comparison-overlap]
    named = FromBuilder(path, {"vocab_size": 7, "hidden_size": 3}).build(make_tokenizer())
    assert named.get_submodule("0").weight.shape == (7, 3)  # type: ignore[union-attr]


def test_a_builder_gets_the_tokenizer_it_asks_for() -> None:
    recipe = FromBuilder(f"{__name__}:tokenizer_builder")
    assert recipe.build(make_tokenizer(words=3)).out_features == 8  # type: ignore[comparison-overlap]
    assert recipe.build().out_features == 1  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(
    ("builder", "kwargs", "error", "problem"),
    [
        ("function", None, ValueError, r"package\.module:function.*got 'function'"),
        ("no_such_package:function", None, ValueError, "cannot be imported: No module named 'no_such_package'"),
        (f"{__name__}:nothing", None, ValueError, "cannot be imported.*nothing"),
        (f"{__name__}:V", None, TypeError, "must be callable, got int"),
        (f"{__name__}:number_builder", None, TypeError, r"must return a torch\.nn\.Module, got int"),
        (f"{__name__}:bert_builder", None, ValueError, "do not fit builder.*vocab_size"),
        (f"{__name__}:bert_builder", {"vocab_size": 3, "width": 2}, ValueError, "do not fit builder.*width"),
    ],
)
def test_a_builder_that_cannot_work_is_refused(
    builder: str, kwargs: dict[str, Any] | None, error: type[Exception], problem: str
) -> None:
    with pytest.raises(error, match=problem):
        FromBuilder(builder, kwargs).build()


# all recipes


def recipes(folder: Path) -> dict[str, dict[str, Any]]:
    make_teacher("bert").save_pretrained(folder)
    return {
        "FromConfig": {"config": WIDE, "seed": 1},
        "FromPretrained": {"path": str(folder)},
        "FromBuilder": {"builder": f"{__name__}:bert_builder", "kwargs": {"vocab_size": V}},
        "WarmStart": {"teacher": str(folder), "layers": [0, 3], "student_type": "distilbert"},
    }


@pytest.mark.parametrize("name", ["FromConfig", "FromPretrained", "FromBuilder", "WarmStart"])
def test_a_yaml_names_the_recipe_and_building_it_touches_no_generator(name: str, tmp_path: Path) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--student", type=StudentRecipe)
    class_path = f"foundry_lightning.students.{name}"
    parsed = parser.parse_object({"student": {"class_path": class_path, "init_args": recipes(tmp_path)[name]}})
    recipe = parser.instantiate_classes(parsed).student
    assert type(recipe).__name__ == name
    before = generator_states()
    student = pickle.loads(pickle.dumps(recipe)).build(make_tokenizer())
    assert generator_states() == before
    again = recipe.build(make_tokenizer()).state_dict()
    assert all(torch.equal(tensor, again[key]) for key, tensor in student.state_dict().items())


def test_warm_start_builds_what_warm_start_student_makes_of_the_folder(tmp_path: Path) -> None:
    teacher = make_teacher("bert")
    teacher.save_pretrained(tmp_path)
    assert torch.equal(scores(WarmStart(str(tmp_path), 2).build()), scores(warm_start_student(teacher, layers=[0, 3])))
