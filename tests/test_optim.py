"""Muon for hidden matrices beside AdamW for the rest: one optimizer to Lightning, checkpoints and schedule."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from foundry_lightning import DataPipeline, MLMConfig, MLMTrainer
from foundry_lightning.optim import MuonWithAdamW, hidden_matrices, optimizer_with_schedule, parameter_groups
from tests.conftest import BiasStudent, texts, tiny_bert

SETTINGS = {
    "learning_rate": 1e-2,
    "progress_bar": False,
    "device": "cpu",
    "optimizer": "muon",
    "lr_scheduler": "linear",
}


def trained(tokenizer, *, steps=6, resume=None, seed=0, rows=None, **config):
    student = tiny_bert(len(tokenizer), seed=seed)
    trainer = MLMTrainer(student, tokenizer, MLMConfig(**{**SETTINGS, **config}))
    if resume is not None:
        trainer.resume_from_checkpoint(resume)
    pipe = DataPipeline(rows or texts(40), tokenizer, batch_size=4, max_length=16)
    return trainer, trainer.train(pipe, shuffle=True, total_steps=steps)


def test_muon_takes_the_matrices_between_hidden_states_and_adamw_the_rest(tokenizer):
    student = tiny_bert(len(tokenizer))
    hidden = hidden_matrices([student], num_ids=len(tokenizer))
    names = {name for name, p in student.named_parameters() if any(p is q for q in hidden)}
    assert names == {
        *(n for n, p in student.named_parameters() if ".encoder.layer." in n and p.ndim == 2),
        "cls.predictions.transform.dense.weight",
    }
    optimizer = MuonWithAdamW(parameter_groups([student], weight_decay=0.1), hidden=hidden, lr=1e-3)
    listed = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(listed) == len(set(listed)) == len(list(student.parameters()))  # tied weights once
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert all(decays[id(p)] == (0.1 if p.ndim == 2 else 0.0) for p in student.parameters())


def test_an_update_is_torchs_muon_on_matrices_and_torchs_adamw_elsewhere(monkeypatch):
    convert = torch.Tensor.to

    def in_float32(tensor, *args, **kwargs):
        return convert(tensor, torch.float32, copy=True)

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 8), nn.Linear(8, 10))

    one, other = model(), model()
    settings = {"learning_rate": 1e-2, "weight_decay": 0.1, "schedule": "constant", "warmup_steps": 0, "total_steps": 9}
    built = optimizer_with_schedule([one], name="muon", num_ids=10, **settings)
    muon = torch.optim.Muon([other[1].weight], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    matrices, vectors = [other[0].weight, other[2].weight], [other[1].bias, other[2].bias]
    adamw = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2
    )
    for _ in range(3):
        for net, optimizers in ((one, [built["optimizer"]]), (other, [muon, adamw])):
            net(torch.arange(10)).square().sum().backward()
            with monkeypatch.context() as patched:
                if net is other:
                    patched.setattr(torch.Tensor, "bfloat16", in_float32)
                    patched.setattr(torch.Tensor, "to", in_float32)  # what torch 2.15 calls
                for optimizer in optimizers:
                    optimizer.step()
            net.zero_grad()
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)


class Dtypes(TorchDispatchMode):
    """Types of what the matrix products gave."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.seen.add(output.dtype)
        return output


def test_muon_computes_in_float32_on_a_cpu_and_leaves_the_gradient_as_it_is():
    net = nn.Linear(6, 8, bias=False)
    optimizer = MuonWithAdamW(parameter_groups([net], weight_decay=0.0), hidden=[net.weight], lr=1e-2)
    net.weight.grad = torch.randn(8, 6)
    gradient = net.weight.grad.clone()
    with Dtypes() as dtypes:
        optimizer.step()
    assert dtypes.seen == {torch.float32}
    assert torch.equal(net.weight.grad, gradient)


@pytest.mark.parametrize("bias", [True, False], ids=["AdamW has groups already", "AdamW has none yet"])
def test_what_is_unfrozen_and_added_later_is_updated_by_adamw(bias):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6, bias=bias), nn.Linear(6, 5))
    late = list(net[1].parameters())
    optimizer = MuonWithAdamW(parameter_groups([net[0]], weight_decay=0.1), hidden=[net[0].weight], lr=1e-2)
    optimizer.add_param_group({"params": late, "weight_decay": 0.0})
    before = [p.detach().clone() for p in late]
    for _ in range(2):
        net(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()
    assert all((p - q).abs().max() > 1e-3 for p, q in zip(late, before, strict=True))
    assert {"exp_avg", "exp_avg_sq"} <= set(optimizer.state[late[0]])  # AdamW's
    other = MuonWithAdamW(parameter_groups([net[0]], weight_decay=0.1), hidden=[net[0].weight], lr=1e-2)
    other.add_param_group({"params": late, "weight_decay": 0.0})
    other.load_state_dict(optimizer.state_dict())
    assert other.state[late[0]]["step"] == 2
    assert other._parts[1].param_groups[-1] is other.param_groups[-1]


def test_all_groups_follow_the_one_schedule_and_training_lowers_the_loss(tokenizer):
    rates = []

    class Watch(Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            rates.extend({group["lr"] for group in optimizer.param_groups})

    rows = ["the cat sat on a mat"] * 40
    _, result = trained(tokenizer, steps=40, rows=rows, trainer_kwargs={"callbacks": [Watch()]})
    assert rates == pytest.approx([1e-2 * (1 - k / 40) for k in range(40)])
    assert sum(result["losses"][-5:]) < 0.5 * sum(result["losses"][:5])


def test_a_run_with_muon_resumes_to_the_bit_from_a_checkpoint_of_tensors(tokenizer, tmp_path):
    whole, result = trained(tokenizer, steps=6)
    stopped, _ = trained(tokenizer, steps=6, trainer_kwargs={"max_steps": 6}, save_every=3, save_dir=str(tmp_path))
    torch.load(tmp_path / "step=00000003.ckpt", weights_only=True)
    resumed, rest = trained(tokenizer, steps=6, resume=tmp_path / "step=00000003.ckpt", seed=1)
    assert rest["losses"] == result["losses"][3:]
    for a, b, c in zip(*(t.student.parameters() for t in (whole, stopped, resumed)), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_the_optimizer_may_not_change_at_a_resume(tokenizer, tmp_path):
    trained(tokenizer, steps=3, save_every=3, save_dir=str(tmp_path))
    with pytest.raises(ValueError, match="optimizer was 'muon' and is 'adamw' now"):
        trained(tokenizer, resume=tmp_path, optimizer="adamw")


def test_a_student_without_hidden_matrices_is_refused(tokenizer):
    config = MLMConfig(**SETTINGS, mask_token_id=4, vocab_size=8)
    with pytest.raises(ValueError, match="optimizer='muon' needs hidden matrices"):
        MLMTrainer(BiasStudent(torch.zeros(8)), config=config).train([torch.tensor([[5, 6]])])


def test_a_resumed_run_with_muon_takes_todays_rate_and_decay(tokenizer, tmp_path):
    groups = []

    class Watch(Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            groups.append([(group["lr"], group["weight_decay"]) for group in optimizer.param_groups])

    trained(tokenizer, steps=3, save_every=3, save_dir=str(tmp_path))
    changed = {"learning_rate": 2e-2, "lr_scheduler": "constant", "weight_decay": 0.25}
    trained(tokenizer, steps=5, resume=tmp_path, **changed, trainer_kwargs={"callbacks": [Watch()]})
    assert groups == [[(2e-2, 0.25), (2e-2, 0.25), (2e-2, 0.0)]] * 2


def test_muon_leaves_out_an_update_that_is_not_finite(tokenizer):
    weights = []

    class Poison(Callback):
        def on_after_backward(self, trainer, module):
            if trainer.global_step == 1:
                module.student.bert.encoder.layer[0].output.dense.weight.grad[0, 0] = float("nan")

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            weights.append(torch.cat([p.detach().flatten() for p in module.student.parameters()]))

    trained(tokenizer, steps=3, on_nonfinite="skip", trainer_kwargs={"callbacks": [Poison()]})
    first, second, third = weights
    assert torch.equal(first, second)
    assert not torch.equal(second, third)
    assert torch.isfinite(third).all()
