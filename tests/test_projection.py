import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from foundry_lightning import EncoderDistillConfig, EncoderDistillTrainer, MLMConfig, MLMTrainer
from foundry_lightning.losses import Scored, vocabulary_loss
from foundry_lightning.mlm_head import WithMLMHead
from foundry_lightning.projection import (
    PlainProjection,
    ScoredProjection,
    find_projection,
    hidden_size,
    output_vocab_size,
)

VOCAB = 40
POSITIONS = torch.tensor([9, 1, 4, 3, 13])
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}


def from_config(config_class: str, **settings: Any) -> nn.Module:
    return transformers.AutoModelForMaskedLM.from_config(getattr(transformers, config_class)(**settings))


def distilbert() -> nn.Module:
    return from_config("DistilBertConfig", vocab_size=VOCAB, dim=16, n_layers=1, n_heads=2, hidden_dim=24)


def modernbert() -> nn.Module:
    special = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    return from_config("ModernBertConfig", **SMALL, **special)


def bert_body() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**SMALL), add_pooling_layer=False)


class CustomEncoder(nn.Module):
    """An encoder without config that takes no attention mask and returns a tensor."""

    hidden_size = 16

    def __init__(self, output: str = "tensor") -> None:
        super().__init__()
        self.output = output
        self.embedding = nn.Embedding(VOCAB, 16)
        self.positions = nn.Embedding(24, 16)
        self.mix = nn.Linear(16, 16)
        self.dropout = nn.Dropout(0.1)

    def forward(self, input_ids: Tensor) -> Any:
        hidden = self.embedding(input_ids) + self.positions.weight[: input_ids.shape[1]]
        hidden = self.dropout(torch.tanh(self.mix(hidden + hidden.mean(1, keepdim=True))))
        if self.output == "object":
            return SimpleNamespace(last_hidden_state=hidden)
        return hidden if self.output == "tensor" else (hidden, None)


class OnlyLogits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 16)
        self.out = nn.Linear(16, VOCAB)

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.out(self.embedding(input_ids)))


class BiasStudent(nn.Module):
    """One vector returned as the score at every place; no embedding, no config."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.bias.expand(*input_ids.shape, 8)


class MixingHead(WithMLMHead):
    """A head that looks at all positions it is given: it must not see the chosen ones only."""

    def forward(self, input_ids: Tensor, **kwargs: Any) -> SimpleNamespace:
        hidden = self.encoder(input_ids)
        return SimpleNamespace(logits=self.decoder(hidden - hidden.mean(1, keepdim=True)))


class LateBiasHead(WithMLMHead):
    """A bias is added in place: the logits are the Linear's output object and yet are not its scores."""

    def __init__(self) -> None:
        super().__init__(CustomEncoder(), vocab_size=VOCAB)
        self.late_bias = nn.Parameter(torch.zeros(VOCAB))

    def forward(self, input_ids: Tensor, **kwargs: Any) -> SimpleNamespace:
        logits = self.decoder(self.encoder(input_ids))
        if logits.shape[-1] == VOCAB:
            logits += self.late_bias
        return SimpleNamespace(logits=logits)


class FailingHead(WithMLMHead):
    """A head that cannot run on other rows than it expects, and fails in the middle of the proof."""

    def forward(self, input_ids: Tensor, **kwargs: Any) -> SimpleNamespace:
        hidden = self.encoder(input_ids)
        return SimpleNamespace(logits=self.decoder(hidden.view(*input_ids.shape, 16)))


SCORED = {
    "bert": lambda: from_config("BertConfig", **SMALL),
    "roberta": lambda: from_config("RobertaConfig", **SMALL),
    "distilbert": distilbert,
    "albert": lambda: from_config("AlbertConfig", **SMALL, embedding_size=8),
    "electra": lambda: from_config("ElectraConfig", **SMALL, embedding_size=8),
    "deberta_v2": lambda: from_config("DebertaV2Config", **SMALL, relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "xlm_roberta": lambda: from_config("XLMRobertaConfig", **SMALL),
    "mpnet": lambda: from_config("MPNetConfig", **SMALL),
    "modernbert": modernbert,
    "tuples": lambda: from_config("BertConfig", **SMALL, return_dict=False, output_hidden_states=True),
    "head_on_bert": lambda: WithMLMHead(bert_body()),
    "tied_head_on_bert": lambda: WithMLMHead(bert_body(), tie_weights=True),
    "head_on_tensor": lambda: WithMLMHead(CustomEncoder(), vocab_size=VOCAB),
    "tied_head_on_tuple": lambda: WithMLMHead(CustomEncoder("tuple"), vocab_size=VOCAB, tie_weights=True),
    "head_on_object": lambda: WithMLMHead(CustomEncoder("object"), vocab_size=VOCAB),
}
PLAIN = {
    "deberta_v2_functional": (lambda: from_config("DebertaV2Config", **SMALL, legacy=False), "no nn.Linear"),
    "esm": (lambda: from_config("EsmConfig", **SMALL, mask_token_id=3), "no nn.Linear"),
    "mobilebert": (
        lambda: from_config("MobileBertConfig", **SMALL, embedding_size=8, true_hidden_size=8, intra_bottleneck_size=8),
        "no nn.Linear",
    ),
    "only_logits": (OnlyLogits, "no base_model"),
    "bias_student": (BiasStudent, "no base_model"),
    "mixing_head": (lambda: MixingHead(CustomEncoder(), vocab_size=VOCAB), "other scores"),
    "failing_head": (lambda: FailingHead(CustomEncoder(), vocab_size=VOCAB), "RuntimeError"),
}
ALL = SCORED | {name: make for name, (make, _) in PLAIN.items()}


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = ALL[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # fresh biases are zero and would hide a lost one
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def make_inputs(model: nn.Module, classes: int = VOCAB) -> dict[str, Tensor]:
    input_ids = torch.randint(3, classes, (2, 8), generator=torch.Generator().manual_seed(2))
    inputs = {"input_ids": input_ids}
    if not isinstance(model, (OnlyLogits, BiasStudent)):
        inputs["attention_mask"] = torch.ones_like(input_ids)
        inputs["attention_mask"][1, 6:] = 0
    return inputs


def logits_of(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    return output[0] if isinstance(output, tuple) else output.logits


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return grads


@pytest.mark.parametrize("name", ALL)
def test_value_and_gradients_equal_the_models_own_cross_entropy(name):
    model = make_model(name)
    classes = output_vocab_size(model)
    inputs = make_inputs(model, classes)
    labels = torch.full((16,), -100)
    labels[POSITIONS] = torch.arange(POSITIONS.numel()) + 2
    expected = F.cross_entropy(logits_of(model(**inputs)).flatten(0, 1), labels)
    expected.backward()
    wanted = gradients(model)

    projection = find_projection(model)
    if name in SCORED:
        assert isinstance(projection, ScoredProjection), projection.reason
        assert projection.reason == "scored positions"
    else:
        assert isinstance(projection, PlainProjection)
        assert PLAIN[name][1] in projection.reason
    projected = projection(model, inputs, positions=POSITIONS)
    loss = vocabulary_loss(projected.scored, labels=labels[POSITIONS], mlm_weight=1 / POSITIONS.numel()).total
    loss.backward()
    got = gradients(model)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    assert {key for key, grad in got.items() if grad is None} == {key for key, grad in wanted.items() if grad is None}
    for key, grad in wanted.items():
        if grad is not None:
            torch.testing.assert_close(got[key], grad, rtol=1e-5, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", ALL)
def test_no_positions_reach_the_same_parameters_with_zero_gradients(name):
    model = make_model(name)
    inputs = make_inputs(model, output_vocab_size(model))
    projection = find_projection(model)
    some = projection(model, inputs, positions=POSITIONS).scored
    vocabulary_loss(some, labels=torch.ones(POSITIONS.numel(), dtype=torch.int64)).total.backward()
    reached = {key for key, grad in gradients(model).items() if grad is not None}
    none = projection(model, inputs, positions=POSITIONS[:0]).scored
    loss = vocabulary_loss(none, labels=POSITIONS[:0]).total
    loss.backward()
    grads = {key: grad for key, grad in gradients(model).items() if grad is not None}
    assert loss.item() == 0.0
    assert set(grads) == reached
    assert not any(grad.any() for grad in grads.values())


@pytest.mark.parametrize("name", ["bert", "modernbert", "esm", "mobilebert", "tuples", "head_on_object"])
def test_hidden_is_the_last_hidden_state_of_the_body(name):
    model = make_model(name)
    inputs = make_inputs(model)
    hidden = find_projection(model)(model, inputs, positions=POSITIONS).hidden
    body_inputs = {"input_ids": inputs["input_ids"]} if isinstance(model, WithMLMHead) else inputs
    output = model.base_model(**body_inputs)
    expected = output[0] if isinstance(output, tuple) else output.last_hidden_state
    torch.testing.assert_close(hidden, expected)
    assert hidden_size(model) == 16


def test_a_model_without_body_has_no_hidden_states():
    model = BiasStudent()
    projected = find_projection(model)(model, {"input_ids": torch.zeros(2, 8, dtype=torch.int64)}, positions=POSITIONS)
    assert projected.hidden is None
    assert output_vocab_size(model) == 8
    with pytest.raises(ValueError, match="must call a base_model"):
        hidden_size(model)


@pytest.mark.parametrize("name", ["bert", "tied_head_on_tuple", "esm", "mixing_head", "failing_head"])
def test_the_proof_leaves_the_model_untouched(name):
    model = make_model(name)
    model.train()
    model.base_model.eval()
    model.register_buffer("counter", torch.tensor([1.5]))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)

    def everything() -> dict[str, Any]:
        return {
            "tensors": {key: value.clone() for key, value in model.state_dict().items()},
            "identities": [id(tensor) for tensor in (*model.parameters(), *model.buffers())],
            "grads": [parameter.grad.clone() for parameter in model.parameters()],
            "flags": [parameter.requires_grad for parameter in model.parameters()],
            "modes": [module.training for module in model.modules()],
            "hooks": [(dict(module._forward_hooks), dict(module._forward_pre_hooks)) for module in model.modules()],
            "forwards": ["forward" in vars(module) for module in model.modules()],
            "generator": torch.get_rng_state(),
            "grad_mode": torch.is_grad_enabled(),
        }

    before = everything()
    find_projection(model)
    hidden_size(model)
    output_vocab_size(model)
    after = everything()
    for key in ("tensors", "grads", "generator"):
        torch.testing.assert_close(after.pop(key), before.pop(key), rtol=0, atol=0)
    assert after == before


@pytest.mark.parametrize("trainer", ["mlm", "encoder"])
def test_the_start_leaves_block_sparse_attention_as_it_is(tokenizer, trainer):
    config = transformers.BigBirdConfig(
        **{"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"intermediate_size": 32, "max_position_embeddings": 512, "block_size": 16, "num_random_blocks": 1},
    )
    model = transformers.BigBirdForMaskedLM(config).train()
    model.bert.encoder.layer[0].eval()
    modules = {name: (module, module.training) for name, module in model.named_modules()}
    if trainer == "mlm":
        MLMTrainer(model, tokenizer, MLMConfig(device="cpu"))
    else:
        teacher = copy.deepcopy(model).bert
        EncoderDistillTrainer(model.bert, teacher, EncoderDistillConfig(device="cpu"))
        assert teacher.attention_type == teacher.encoder.attention_type == "block_sparse"
    assert model.bert.attention_type == model.bert.encoder.attention_type == "block_sparse"
    assert {name: (module, module.training) for name, module in model.named_modules()} == modules


def test_a_late_bias_is_found_while_it_still_is_zero():
    model = LateBiasHead()
    assert not model.late_bias.any()
    assert "other scores" in find_projection(model).reason


def test_a_failing_forward_leaves_neither_hooks_nor_a_shadowed_forward():
    model = make_model("bert")
    projection = find_projection(model)
    with pytest.raises(IndexError):
        projection(model, make_inputs(model), positions=torch.tensor([999]))
    assert not any(module._forward_hooks or "forward" in vars(module) for module in model.modules())


def test_the_proof_consumes_no_randomness_of_a_random_model():
    class Noisy(CustomEncoder):
        def forward(self, input_ids: Tensor) -> Tensor:
            return super().forward(input_ids) + torch.rand(16)

    model = WithMLMHead(Noisy(), vocab_size=VOCAB)
    state = torch.get_rng_state()
    assert "other scores" in find_projection(model).reason
    assert torch.equal(torch.get_rng_state(), state)


class NumelRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self.largest = max(self.largest, tensor.numel())
        return output


@pytest.mark.parametrize("name", ["bert", "modernbert", "head_on_tensor"])
def test_the_scored_path_never_holds_scores_of_all_places(name):
    model = make_model(name)
    projection = find_projection(model)
    input_ids = torch.ones(4, 24, dtype=torch.int64)
    with NumelRecorder() as recorded:
        projected = projection(model, {"input_ids": input_ids}, positions=POSITIONS)
        vocabulary_loss(projected.scored, labels=POSITIONS, block_bytes=4 * VOCAB * 2).total.backward()
    places = input_ids.numel()
    # The body's own activations [4, 2, 24, 24] (attention) and [4, 24, 2 · 24] bound what is left.
    assert recorded.largest <= 4 * 2 * 24 * 24
    assert recorded.largest >= places * 16
    wide = WithMLMHead(CustomEncoder(), vocab_size=1000)
    projection = find_projection(wide)
    assert isinstance(projection, ScoredProjection)
    with NumelRecorder() as recorded:
        projected = projection(wide, {"input_ids": input_ids}, positions=POSITIONS)
        vocabulary_loss(projected.scored, labels=POSITIONS, block_bytes=4 * 1000 * 2).total.backward()
    assert recorded.largest == 1000 * 16  # the decoder's weight; scores of all places would be 1000 · 96


def test_a_model_in_bfloat16_is_scored():
    model = make_model("bert").bfloat16()
    projection = find_projection(model)
    assert isinstance(projection, ScoredProjection), projection.reason
    scores = projection(model, make_inputs(model), positions=POSITIONS).scored.scores()
    expected = model(**make_inputs(model)).logits.flatten(0, 1)[POSITIONS]
    torch.testing.assert_close(scores, expected, rtol=0.05, atol=0.05)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_gradient_checkpointing_changes_no_gradient():
    model = make_model("bert").train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    projection = find_projection(model)
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        scored = projection(model, make_inputs(model), positions=POSITIONS).scored
        vocabulary_loss(scored, labels=POSITIONS).total.backward()
        results.append({key: grad for key, grad in gradients(model).items() if grad is not None})
    torch.testing.assert_close(results[0], results[1])


def test_a_teacher_and_a_student_on_both_paths_give_one_loss():
    student, teacher = make_model("distilbert"), make_model("bert")
    inputs = make_inputs(student)

    def total(projections: tuple[Any, Any]) -> Tensor:
        sides: list[Scored] = [
            projection(model, inputs, positions=POSITIONS).scored
            for projection, model in zip(projections, (student, teacher), strict=True)
        ]
        return vocabulary_loss(sides[0], labels=POSITIONS, teacher=sides[1], distill_weight=2.0).total

    scored = total((find_projection(student), find_projection(teacher)))
    plain = total((PlainProjection("distilbert", "test"), PlainProjection("bert", "test")))
    torch.testing.assert_close(scored, plain)


def test_the_head_is_initialised_like_berts():
    model = WithMLMHead(CustomEncoder(), vocab_size=2000)
    assert model.decoder.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert not model.decoder.bias.any()
    assert not model.dense.bias.any()


def test_a_tied_head_shares_and_keeps_the_input_embedding():
    encoder = CustomEncoder()
    before = encoder.embedding.weight.clone()
    model = WithMLMHead(encoder, vocab_size=VOCAB, tie_weights=True)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert torch.equal(encoder.embedding.weight, before)


def test_the_head_reads_sizes_from_the_encoder_and_gives_its_config():
    encoder = bert_body()
    model = WithMLMHead(encoder)
    assert tuple(model.decoder.weight.shape) == (VOCAB, 16)
    assert model.config is encoder.config
    assert model.base_model is encoder
    assert not hasattr(WithMLMHead(CustomEncoder(), vocab_size=VOCAB), "config")


def test_labels_add_the_mean_cross_entropy():
    model = make_model("head_on_bert")
    inputs = make_inputs(model)
    labels = torch.full((2, 8), -100)
    labels[0, 3] = 5
    output = model(**inputs, labels=labels)
    torch.testing.assert_close(output.loss, -output.logits[0, 3].log_softmax(-1)[5])
    assert model(**inputs).loss is None


def test_sizes_that_are_not_known_are_asked_for_by_name():
    with pytest.raises(ValueError, match="^hidden_size must be given"):
        WithMLMHead(nn.Sequential(nn.Embedding(VOCAB, 16)))
    with pytest.raises(ValueError, match="^vocab_size must be given"):
        WithMLMHead(CustomEncoder())  # two embeddings: which one holds the tokens is not known
    assert WithMLMHead(nn.Sequential(nn.Embedding(VOCAB, 16)), hidden_size=16).decoder.out_features == VOCAB


def test_weights_that_cannot_be_tied_are_refused():
    with pytest.raises(ValueError, match="^tie_weights needs an input embedding of shape"):
        WithMLMHead(CustomEncoder(), vocab_size=VOCAB + 1, tie_weights=True)
    electra = transformers.ElectraModel(transformers.ElectraConfig(**SMALL, embedding_size=8))
    with pytest.raises(ValueError, match=r"got \(40, 8\)"):
        WithMLMHead(electra, tie_weights=True)


def test_an_encoder_without_hidden_states_is_refused_with_advice():
    model = WithMLMHead(nn.Sequential(nn.Embedding(VOCAB, 16), nn.Flatten()), hidden_size=16)
    with pytest.raises(TypeError, match="the encoder must return hidden states"):
        model(torch.zeros(2, 8, dtype=torch.int64))


def test_a_strategy_that_may_shard_weights_scores_all_places_and_says_so():
    import lightning
    from lightning.pytorch.strategies import FSDPStrategy

    from foundry_lightning import MLMConfig, MLMLitModule
    from tests.conftest import tiny_bert

    module = MLMLitModule(tiny_bert(VOCAB), config=MLMConfig(mask_token_id=4))
    module.prepare()
    assert isinstance(module.projection, ScoredProjection)
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer._accelerator_connector.strategy = FSDPStrategy()  # it starts on GPUs only
    module.trainer = trainer
    with pytest.warns(UserWarning, match="FSDPStrategy may shard weights: all places are scored"):
        module._fit_to_strategy()
    assert isinstance(module.projection, PlainProjection)
    assert "FSDPStrategy" in module.projection.reason
    trainer.ckpt_path, trainer.state.fn = "step=00000002.ckpt", "fit"
    with pytest.raises(ValueError, match="a checkpoint cannot be gone on with under FSDPStrategy.*set strategy='ddp'"):
        module._fit_to_strategy()


# ------------------------------------------------------------------ sizes


def test_the_head_sees_few_sizes_however_many_places_are_chosen():
    """oneDNN keeps a GELU for each size: where the head saw them all, 250 updates took 169 MiB more, now 8."""
    model = WithMLMHead(bert_body()).eval()
    projection = find_projection(model)
    seen = []
    model.norm.register_forward_hook(lambda _, args, __: seen.append(args[0].shape[1]))
    inputs = {"input_ids": torch.randint(5, VOCAB, (8, 20)), "attention_mask": torch.ones(8, 20, dtype=torch.long)}
    expected = model(**inputs).logits.flatten(0, 1)
    seen.clear()
    for count in (0, 1, 63, 64, 65, 160):
        chosen = torch.randperm(160)[:count]
        scored = projection(model, inputs, positions=chosen).scored
        assert scored.features.shape[0] == count
        torch.testing.assert_close(scored.scores(), expected[chosen])
    assert seen == [0, 64, 64, 64, 128, 192]
