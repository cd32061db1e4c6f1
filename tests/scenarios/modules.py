"""Kinds of module whose weights are used, shared or hooked in their own ways."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .parts import (
    VOCABULARY,
    WIDTH,
    Mlp,
    Stack,
    UnitModule,
    as_unit,
    inputs,
    stack_of,
    token_step,
    train_step,
    train_step_input_grad,
)
from .registry import add_scenario, scenario


class Attention(UnitModule):
    """Causal attention with two heads over the batch as a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (2, WIDTH // 2)).unsqueeze(0).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(heads.transpose(1, 2).flatten(-2).squeeze(0))


add_scenario("scaled_dot_product_attention", stack_of(Attention), train_step)


class TorchAttention(UnitModule):
    """nn.MultiheadAttention, which reads its inner layer's weights without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


add_scenario("multihead_attention", stack_of(TorchAttention), train_step)


class EncoderLayer(UnitModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@scenario(stack_of(EncoderLayer))
def encoder_layer_fast_path_then_training(model: nn.Module) -> list[Tensor]:
    model.eval()
    with torch.no_grad():
        output = model(inputs())
    model.train()
    train_step(model)
    return [output]


class Lstm(UnitModule):
    """nn.LSTM, which keeps a list of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


add_scenario("lstm", stack_of(Lstm), train_step)


class Conv(UnitModule):
    """Two convolutions with a batch norm between them, whose buffers are this rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 2, 3, padding=1)
        self.norm = nn.BatchNorm1d(2)
        self.second = nn.Conv1d(2, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x.unsqueeze(1))).relu()).squeeze(1)


add_scenario("convolution_and_batch_norm", stack_of(Conv), train_step)


class Embedded(nn.Module):
    """An embedding as a unit of its own, whose weight backward never reads, and a unit after it."""

    def __init__(self, *, max_norm: float | None = None) -> None:
        super().__init__()
        self.embedding = as_unit(nn.Embedding(VOCABULARY, WIDTH, max_norm=max_norm))
        self.body = Mlp()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.body(self.embedding(tokens))


add_scenario("embedding", Embedded, token_step)


@scenario(lambda: Embedded(max_norm=0.5), raises=r"(?i)embedding.*in place")
def embedding_max_norm_edits_its_weight(model: nn.Module) -> None:
    model(torch.arange(VOCABULARY)).square().sum().backward()


class TiedUnit(UnitModule):
    """An embedding and a head that share one weight, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(tokens))))


class TiedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tied = TiedUnit()
        self.last = nn.Linear(VOCABULARY, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.tied(tokens))


add_scenario("tied_weights_in_one_unit", TiedModel, token_step)


class HeadGivenItsWeight(UnitModule):
    """A unit that multiplies with a weight that is handed to it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(self.norm(x), weight)


class WeightAsArgument(nn.Module):
    """The root's embedding weight is an argument of an inner unit, as in a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.body = Mlp()
        self.head = HeadGivenItsWeight()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(tokens)), self.embedding.weight)


add_scenario("weight_of_the_root_given_to_a_unit", WeightAsArgument, token_step)


class Parametrized(UnitModule):
    """Weights that are properties, computed from other parameters at each read."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations = nn.utils.parametrizations
        self.first = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.second = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


add_scenario("parametrized_weights", stack_of(Parametrized), train_step_input_grad)


def make_old_weight_norm() -> nn.Module:
    """The hook-based weight norm on the unit itself: its pre-hook reads the unit's parameters."""
    return as_unit(nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)))


add_scenario("weight_norm_hook_on_a_unit", stack_of(make_old_weight_norm), train_step_input_grad)


class HooksReadWeights(Mlp):
    """The user's own hooks on the unit, which read its weights around its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(lambda unit, args: (args[0] + unit.first.weight.sum(),))
        self.register_forward_hook(lambda unit, _, output: output * unit.second.weight.mean())


add_scenario("user_hooks_read_weights", stack_of(HooksReadWeights), train_step_input_grad)


@scenario(Stack)
def full_backward_hooks(model: nn.Module) -> list[Tensor]:
    seen = []
    for unit in model.units:
        unit.register_full_backward_hook(lambda _, __, grads: seen.append(grads[0].abs().sum()))
    model(inputs(requires_grad=True)).square().sum().backward()
    return [torch.stack(seen)]
