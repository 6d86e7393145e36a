"""The world model against slow twins."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from actorlearner.agents.world_model import (
    Head,
    ImagePlan,
    ModelSize,
    ObservationDecoder,
    ObservationEncoder,
    RecurrentCore,
    RepresentationModel,
    State,
    WorldModel,
    divergences,
    sees_images,
)
from actorlearner.contracts import ArraySpec
from actorlearner.distributions import Categorical, NumPyNoise

SIZE = ModelSize(deterministic=16, units=8, latents=4, classes=4, blocks=4, image_depth=2)
VECTOR = {"observation": ArraySpec((3,), "float32")}


def noise(seed: int = 0) -> NumPyNoise:
    return NumPyNoise(np.random.default_rng(seed))


def states(*leading: int, seed: int = 0) -> State:
    g = torch.Generator().manual_seed(seed)
    chosen = torch.randint(4, (*leading, 4), generator=g)
    one_hot = torch.nn.functional.one_hot(chosen, 4).float()
    return State(torch.randn(*leading, 16, generator=g).tanh(), one_hot)


def draw(module: torch.nn.Module, seed: int = 0) -> None:
    """Give every parameter a value that matters; biases and zero heads too."""
    torch.manual_seed(seed)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


class TestCore:
    def test_a_step_equals_the_slow_twin(self) -> None:
        """A.1: three embeddings beside each block's own slice; reset, candidate, update."""
        core = RecurrentCore(SIZE, actions=2)
        draw(core)
        w = {name: p.detach().double().numpy() for name, p in core.named_parameters()}
        state, action = states(3), torch.tensor([[0.5, -1.0], [3.0, -0.2], [0.0, 0.0]])

        def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
            return x / np.sqrt((x**2).mean() + 1e-4) * weight

        def embed(name: str, x: np.ndarray) -> np.ndarray:
            x = norm(w[f"{name}.0.weight"] @ x + w[f"{name}.0.bias"], w[f"{name}.1.weight"])
            return x * sigmoid(x)

        following = core(state, action)
        for row in range(3):
            h = state.deterministic[row].double().numpy()
            z = state.stochastic[row].double().numpy().reshape(-1)
            a = action[row].double().numpy()
            a = a / np.maximum(1, np.abs(a))
            shared = np.concatenate(
                [
                    embed("embed_deterministic", h),
                    embed("embed_stochastic", z),
                    embed("embed_action", a),
                ]
            )
            hidden = np.concatenate(
                [
                    np.concatenate([h[4 * g : 4 * g + 4], shared]) @ w["hidden.weight"][g]
                    for g in range(4)
                ]
            )
            hidden = norm(hidden + w["hidden.bias"], w["norm.weight"])
            hidden = hidden * sigmoid(hidden)
            for g in range(4):
                own = slice(4 * g, 4 * g + 4)
                gates = hidden[own] @ w["gates.weight"][g] + w["gates.bias"][12 * g : 12 * g + 12]
                reset, candidate, update = gates[:4], gates[4:8], gates[8:]
                candidate = np.tanh(sigmoid(reset) * candidate)
                update = sigmoid(update - 1)
                expected = update * candidate + (1 - update) * h[own]
                found = following[row, own].detach().numpy()
                np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)

    def test_large_actions_are_scaled_down_without_a_gradient_of_the_scale(self) -> None:
        core, state = RecurrentCore(SIZE, actions=2), states(1)
        one, many = torch.tensor([[1.0, 0.3]]), torch.tensor([[50.0, 0.3]])
        torch.testing.assert_close(core(state, one), core(state, many))
        many.requires_grad_()
        core(state, many).sum().backward()
        assert many.grad is not None
        assert many.grad[0, 0] != 0


class TestUnroll:
    def model(self, **arguments: Any) -> WorldModel:
        torch.manual_seed(0)
        model = WorldModel(VECTOR, 2, SIZE, 0.01, 255)
        draw(model)
        return model

    def sequence(self, length: int, columns: int = 2) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        g = torch.Generator().manual_seed(1)
        action = torch.randn(length, columns, 2, generator=g)
        observation = {"observation": torch.randn(length, columns, 3, generator=g)}
        return action, observation, torch.zeros(length, columns, dtype=torch.bool)

    def test_a_start_in_the_middle_makes_two_sequences(self) -> None:
        """A.5 item 6: state *and* action before it are forgotten there, in that column alone."""
        model, (action, observation, first) = self.model(), self.sequence(6)
        first[3, 0] = True
        whole, _ = model.unroll(states(2), action, observation, first, Modes())
        later = {k: v[3:, :1] for k, v in observation.items()}
        none = torch.zeros(3, 1, dtype=torch.bool)
        fresh = action[3:, :1].clone()
        fresh[0] = 0
        alone, _ = model.unroll(model.representation.initial(1), fresh, later, none, Modes())
        torch.testing.assert_close(whole.features[3:, :1], alone.features)
        unbroken, _ = model.unroll(states(2), action, observation, first & False, Modes())
        torch.testing.assert_close(whole.features[:, 1], unbroken.features[:, 1])
        assert not torch.allclose(whole.features[3, 0], unbroken.features[3, 0])

    def test_goes_on_from_a_state_in_the_middle(self) -> None:
        """E.1 item 8: starting from a stored latent is going on."""
        model, (action, observation, first) = self.model(), self.sequence(6)
        whole, _ = model.unroll(states(2), action, observation, first, Modes())
        middle = State(whole.deterministic[2], whole.stochastic[2])
        later = {k: v[3:] for k, v in observation.items()}
        rest, _ = model.unroll(middle, action[3:], later, first[3:], Modes())
        torch.testing.assert_close(whole.features[3:], rest.features)

    def test_one_step_at_a_time_is_the_same(self) -> None:
        """As in acting."""
        model, (action, observation, first) = self.model(), self.sequence(4)
        whole, posterior = model.unroll(states(2), action, observation, first, noise())
        state, drawn = states(2), noise()
        for t in range(4):
            tokens = model.representation.encoder({k: v[t] for k, v in observation.items()})
            state, _ = model.representation.observe(state, action[t], tokens, drawn)
            torch.testing.assert_close(state.features, whole.features[t])
        assert posterior.probs.shape == (4, 2, 4, 4)

    def test_no_class_is_without_probability(self) -> None:
        """A.5 item 4: of posterior and prior, whose divergence is taken."""
        model, (action, observation, first) = self.model(), self.sequence(4)
        for head in (model.representation.posterior, model.prior):
            torch.nn.init.normal_(head[-1].weight, std=300)
        followed, posterior = model.unroll(states(2), action, observation, first, noise())
        for latents in (posterior, model.predict(followed)):
            assert latents.probs.min().item() == pytest.approx(0.01 / 4, rel=1e-3)

    def test_the_observation_is_part_of_the_state(self) -> None:
        """A.5 item 10: the posterior, not the prior."""
        model, (action, observation, first) = self.model(), self.sequence(1)
        _, posterior = model.unroll(states(2), action, observation, first, noise())
        other = {"observation": observation["observation"] + 1}
        _, another = model.unroll(states(2), action, other, first, noise())
        assert not torch.allclose(posterior.probs, another.probs)

    def test_imagination_takes_the_prior_that_is_trained(self) -> None:
        """A.5 item 2."""
        model, start = self.model(), states(5)
        actions = torch.randn(3, 5, 2)
        given = iter(actions)
        features, taken = model.imagine(start, lambda _: next(given), 3, noise())
        assert torch.equal(taken, actions)
        assert torch.equal(features[0], start.features)
        state, drawn = start, noise()
        for t in range(3):
            deterministic = model.representation.core(state, actions[t])
            prior = model.predict(State(deterministic, state.stochastic))
            state = State(deterministic, prior.sample(drawn))
            torch.testing.assert_close(features[t + 1], state.features)


class TestOpenLoop:
    """The model sees the first three rows of six; an episode begins in row 4 of column 1."""

    def model(self) -> WorldModel:
        """One whose observations decide what is drawn."""
        model = TestUnroll().model()
        with torch.no_grad():
            for parameter in model.representation.parameters():
                parameter.mul_(3)
        return model

    def predicted(self, *, observed: int | None = None, acted: int | None = None) -> State:
        """Another observation or action in a row changes what?"""
        model, (action, observation, first) = self.model(), TestUnroll().sequence(6)
        first[4, 1] = True
        if observed is not None:
            observation["observation"][observed] *= -1
        if acted is not None:
            action[acted] += 1
        return model.predict_open_loop(states(2), action, observation, first, 3, noise())

    def test_equals_the_slow_twin(self) -> None:
        """Posterior, then prior, row by row: the same draws, in the same order."""
        model, (action, observation, first) = self.model(), TestUnroll().sequence(6)
        first[4, 1] = True
        found, drawn = self.predicted(), noise()
        state = states(2)
        for t in range(6):
            before = [(h.clone(), z.clone()) for h, z in zip(*state, strict=True)]
            taken = action[t].clone()
            if t == 4:
                before[1] = (torch.zeros(16), torch.zeros(4, 4))
                taken[1] = 0
            state = State(*(torch.stack(part) for part in zip(*before, strict=True)))
            deterministic = model.representation.core(state, taken)
            logits = model.prior(deterministic)
            if t < 3:
                tokens = model.representation.encoder({k: v[t] for k, v in observation.items()})
                logits = model.representation.posterior(torch.cat([deterministic, tokens], 1))
            latents = Categorical(logits.reshape(2, 4, 4), 0.01)
            state = State(deterministic, latents.sample(drawn))
            torch.testing.assert_close(found.deterministic[t], state.deterministic)
            torch.testing.assert_close(found.stochastic[t], state.stochastic, atol=1e-6, rtol=0)

    @pytest.mark.parametrize(
        ("change", "same_rows"),
        [({"observed": 3}, 6), ({"observed": 5}, 6), ({"observed": 2}, 2), ({"acted": 3}, 3)],
        ids=str,
    )
    def test_only_context_and_actions_tell(self, change: dict[str, int], same_rows: int) -> None:
        found, other = self.predicted().features, self.predicted(**change).features
        assert torch.equal(found[:same_rows], other[:same_rows])
        assert not torch.equal(found[same_rows:], other[same_rows:]) or same_rows == 6


class Modes:
    """No chance: every draw is in the middle."""

    def uniform(self, shape: Any) -> Tensor:
        return torch.full(tuple(shape), 0.5)

    def normal(self, shape: Any) -> Tensor:
        return torch.zeros(tuple(shape))


class TestDivergences:
    def pair(self, scale: float) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(0)
        one, other = (torch.randn(2, 3, 4, 4, generator=g) * scale).unbind(0)
        return one.requires_grad_(), other.requires_grad_()

    def test_of_equals_is_the_floor(self) -> None:
        one, _ = self.pair(2.0)
        found = divergences(Categorical(one), Categorical(one), 1.0)
        assert all(torch.equal(value, torch.ones(3)) for value in found.values())

    def test_the_floor_is_under_the_sum_of_latents(self) -> None:
        """A.5 item 3: each latent alone is below one nat here, all together are above."""
        one, other = self.pair(0.6)
        each = Categorical(one).divergence(Categorical(other))
        assert (each < 1).all()
        assert (each.sum(-1) > 1).any()
        found = divergences(Categorical(one), Categorical(other), 1.0)
        for value in found.values():
            torch.testing.assert_close(value, each.sum(-1).clamp(min=1))

    def test_below_the_floor_there_is_no_gradient(self) -> None:
        one, other = self.pair(0.1)
        found = divergences(Categorical(one), Categorical(other), 1.0)
        assert (found["dynamics"] == 1).all()
        sum(value.sum() for value in found.values()).backward()
        assert not one.grad.any()
        assert not other.grad.any()

    def test_each_moves_one_side(self) -> None:
        """A.5 item 5."""
        for name, moved, kept in (("dynamics", 1, 0), ("representation", 0, 1)):
            pair = self.pair(3.0)
            found = divergences(*(Categorical(logits, 0.01) for logits in pair), 1.0)
            found[name].sum().backward()
            assert pair[kept].grad is None or not pair[kept].grad.any()
            assert pair[moved].grad.any()


MIXED = {
    "vector": ArraySpec((3,), "float32"),
    "kind": ArraySpec((2,), "int64", (4, 3)),
    "flag": ArraySpec((), "bool"),
    "pixels": ArraySpec((20, 16, 3), "uint8"),
    "planes": ArraySpec((10, 10, 6), "bool"),
    "stacked": ArraySpec((16, 16), "uint8", stack=2),
}


def observation_of(specs: dict[str, ArraySpec], count: int, seed: int = 0) -> dict[str, Tensor]:
    g = np.random.default_rng(seed)
    made = {}
    for key, spec in specs.items():
        shape = (count, *spec.stacked_shape)
        if spec.categories:
            limits = np.reshape(spec.categories, spec.shape)
            made[key] = torch.from_numpy(g.integers(0, np.broadcast_to(limits, shape)))
        elif spec.dtype == "float32":
            made[key] = torch.from_numpy(g.normal(size=shape).astype(np.float32))
        else:
            high = 2 if spec.dtype == "bool" else 256
            made[key] = torch.from_numpy(g.integers(0, high, shape).astype(spec.dtype))
    return made


class TestObservations:
    def test_mixed_ones_are_encoded_and_decoded(self) -> None:
        encoder, decoder = ObservationEncoder(MIXED, SIZE), ObservationDecoder(MIXED, SIZE)
        observation = observation_of(MIXED, 5)
        tokens = encoder(observation)
        # Vectors 8; pixels 8 channels of 5 x 4; planes 8 of 10 x 10; stacked 8 of 4 x 4.
        assert tokens.shape == (5, encoder.size) == (5, 8 + 8 * 20 + 8 * 100 + 8 * 16)
        decoded = decoder(states(5))
        assert {key: tuple(d.shape[1:]) for key, d in decoded.items()} == {
            "vector": (3,), "kind": (7,), "flag": (1,), "pixels": (3, 20, 16),
            "planes": (6, 10, 10), "stacked": (2, 16, 16),
        }  # fmt: skip
        losses = decoder.losses(states(5), observation)
        assert all(loss.shape == (5,) for loss in losses.values())
        sum(loss.sum() for loss in losses.values()).backward()
        assert all(p.grad is not None for p in decoder.parameters())

    @pytest.mark.parametrize(
        ("spec", "sides"),
        [
            (ArraySpec((64, 64, 3), "uint8"), [(64, 64), (32, 32), (16, 16), (8, 8), (4, 4)]),
            (
                ArraySpec((84, 84), "uint8", stack=4),
                [(84, 84), (42, 42), (21, 21), (11, 11), (6, 6)],
            ),
            (ArraySpec((3, 32, 40), "uint8"), [(32, 40), (16, 20), (8, 10), (4, 5)]),
            (ArraySpec((10, 10, 4), "bool"), [(10, 10), (10, 10)]),
            (ArraySpec((7, 7, 3), "uint8"), [(7, 7), (7, 7)]),
        ],
    )
    def test_sides_of_images(self, spec: ArraySpec, sides: list[tuple[int, int]]) -> None:
        plan = ImagePlan.of(spec, 2)
        assert list(plan.sides) == sides
        assert plan.channels == (4, 6, 8, 8)[-len(sides) + 1 :]
        observation = observation_of({"image": spec}, 2)
        decoder = ObservationDecoder({"image": spec}, SIZE)
        encoder = ObservationEncoder({"image": spec}, SIZE)
        assert encoder(observation).shape == (2, 8 * math.prod(sides[-1]))
        assert decoder.losses(states(2), observation)["image"].shape == (2,)

    def test_small_images_and_numbers_are_vectors(self) -> None:
        assert not sees_images(ArraySpec((4, 9, 3), "uint8"))
        assert not sees_images(ArraySpec((64, 64, 3), "float32"))
        assert not sees_images(ArraySpec((64,), "uint8"))

    def test_errors_are_summed_by_hand(self) -> None:
        """A.5 item 11: not averaged over entries or pixels."""
        decoder = ObservationDecoder(MIXED, SIZE)
        state, observation = states(2), observation_of(MIXED, 2)
        decoded = {k: v.detach().double().numpy() for k, v in decoder(state).items()}
        found = {k: v.tolist() for k, v in decoder.losses(state, observation).items()}
        for i in range(2):
            vector = observation["vector"][i].double().numpy()
            symlog = np.sign(vector) * np.log1p(np.abs(vector))
            assert found["vector"][i] == pytest.approx(((decoded["vector"][i] - symlog) ** 2).sum())
            one, two = observation["kind"][i].tolist()
            logits = decoded["kind"][i]
            expected = np.log(np.exp(logits[:4]).sum()) - logits[one]
            expected += np.log(np.exp(logits[4:]).sum()) - logits[4 + two]
            assert found["kind"][i] == pytest.approx(expected, rel=1e-5)
            pixels = observation["pixels"][i].numpy().transpose(2, 0, 1) / 255
            error = (sigmoid(decoded["pixels"][i]) - pixels) ** 2
            assert found["pixels"][i] == pytest.approx(error.sum(), rel=1e-5)
            planes = observation["planes"][i].numpy().transpose(2, 0, 1)
            p = sigmoid(decoded["planes"][i])
            error = -np.where(planes, np.log(p), np.log(1 - p))
            assert found["planes"][i] == pytest.approx(error.sum(), rel=1e-5)

    def test_what_people_compare_by_hand(self) -> None:
        """Symlogs, probabilities, pixels; of a stack the newest frame."""
        decoder = ObservationDecoder(MIXED, SIZE)
        state, observation = states(2), observation_of(MIXED, 2)
        decoded = {k: v.detach().double().numpy() for k, v in decoder(state).items()}
        found = decoder.compared(state, observation)
        vector, softmax = observation["vector"].numpy(), np.exp(decoded["kind"])
        for part in (slice(0, 4), slice(4, 7)):
            softmax[:, part] /= softmax[:, part].sum(1, keepdims=True)
        kinds = np.eye(4)[observation["kind"][:, 0]], np.eye(3)[observation["kind"][:, 1]]
        planes = observation["planes"].numpy().transpose(0, 3, 1, 2)
        expected = {
            "vector": (decoded["vector"], np.sign(vector) * np.log1p(abs(vector))),
            "kind": (softmax, np.concatenate(kinds, 1)),
            "planes": (sigmoid(decoded["planes"]), planes),
            "stacked": (sigmoid(decoded["stacked"])[:, 1:], observation["stacked"][:, 1:] / 255),
        }
        for key, pair in expected.items():
            for one, other in zip(found[key], pair, strict=True):
                np.testing.assert_allclose(one.detach().numpy(), other, rtol=1e-4, atol=1e-6)

    def test_pixels_are_scaled_and_centred(self) -> None:
        """A.5 item 14, on the one path that learning and acting share."""
        spec = {"image": ArraySpec((16, 16, 3), "uint8")}
        encoder = ObservationEncoder(spec, SIZE)
        seen: list[Tensor] = []
        encoder.images[0].layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        encoder({"image": torch.full((1, 16, 16, 3), 255, dtype=torch.uint8)})
        encoder({"image": torch.zeros((1, 16, 16, 3), dtype=torch.uint8)})
        assert [float(image.unique()) for image in seen] == [0.5, -0.5]

    def test_vectors_are_squeezed(self) -> None:
        encoder = ObservationEncoder(VECTOR, SIZE)
        seen: list[Tensor] = []
        encoder.vector[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        encoder({"observation": torch.tensor([[math.e - 1, 0.0, 1 - math.e]])})
        torch.testing.assert_close(seen[0], torch.tensor([[1.0, 0.0, -1.0]]))


def test_heads_of_scale_zero_say_zero() -> None:
    head = Head(5, 2, 8, 3, scale=0)
    assert not head(torch.randn(4, 5)).any()


def test_the_first_state_is_zeros() -> None:
    model = RepresentationModel(VECTOR, 2, SIZE, 0.01)
    assert not model.initial(3).features.any()
    assert model.initial(3).features.shape == (3, 32)
