"""Sabotages of the privacy path, each with the tests that must fail when it is planted.

A mutant replaces one piece of text, which must stand exactly once in the whole package: code may
move to another module and nothing changes here, but a line that is rewritten has to be looked at
again. `make mutants` plants them one by one in a copy (`tests/mutants/__main__.py`).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One sabotage.

    Attributes:
        name: What to call it by.
        before: Text that stands exactly once in the package.
        after: What it is replaced by.
        tests: The cheapest tests that must fail.
        equivalent: Why nothing can fail, if nothing can.
    """

    name: str
    before: str
    after: str
    tests: tuple[str, ...] = ()
    equivalent: str = ""


def _of(folder: str, file: str) -> str:
    return f"{folder}/test_{file}.py::"


ACCOUNTING = _of("tests/privacy", "accounting")
ALGORITHM = _of("tests", "algorithm")
AUDIT = _of("tests/privacy", "audit")
BUDGET = _of("tests/privacy", "budget")
CHECKPOINT = _of("tests", "checkpoint")
CLIENT = _of("tests", "client")
CLIPPING = _of("tests/privacy", "clipping")
LAYERS = "tests/test_layers.py::"
CONCENTRATED = _of("tests/privacy", "concentrated")
CONTINUED = _of("tests", "continued")
COUNTED = _of("tests", "counted_twice")
DISCRETE = _of("tests/privacy", "discrete_noise")
END_TO_END = _of("tests", "end_to_end")
EXACT = _of("tests/privacy", "exact")
FISHER = _of("tests", "fisher_scoring")
GATEWAY = _of("tests/silo", "gateway")
HOSPITALS = _of("tests/silo", "run_study")
HOSTILE = _of("tests/privacy", "hostile")
KEY_USE = _of("tests/privacy", "key_use")
LEDGER = _of("tests/privacy", "ledger")
LEDGER_FILE = _of("tests/privacy", "ledger_file")
METHODS = _of("tests", "methods")
NATURAL = _of("tests", "natural_gradient")
NOISE = _of("tests/privacy", "noise")
ONLY_RELEASES = _of("tests/privacy", "only_releases")
PLAN = _of("tests/privacy", "plan_and_statement")
SABOTAGE = _of("tests/privacy", "sabotage")
SAMPLING = _of("tests/privacy", "sampling")
SCORE = _of("tests", "score")
SELECT = _of("tests", "selection")
SELECTION = _of("tests/privacy", "selection")
UNEQUAL = _of("tests", "unequal_clients")
UNITS = _of("tests/privacy", "units")

_NOISE = (
    Mutant(
        "noise on gradients, a fifth too little",
        "noisy = add_noise(secret.noise, total, params.noise_std, like=coordinates)",
        "noisy = add_noise(secret.noise, total, 0.8 * params.noise_std, like=coordinates)",
        (f"{ALGORITHM}test_the_noise_that_is_drawn_is_the_noise_that_is_accounted[full]",),
    ),
    Mutant(
        "noise on scores and information, a fifth too little",
        "add_noise(secret.noise, total, params.noise_std, like=like",
        "add_noise(secret.noise, total, 0.8 * params.noise_std, like=like",
        (f"{FISHER}test_noise_is_the_plans",),
    ),
    Mutant(
        "outcomes of scores, drawn from the key of the noise",
        "seeds = jax.random.bits(secret.batch, (capacity, 2), jnp.uint32)",
        "seeds = jax.random.bits(secret.noise, (capacity, 2), jnp.uint32)",
        (f"{KEY_USE}test_no_secret_key_is_used_twice[scores, whose outcomes are drawn]",),
    ),
    Mutant(
        "scores, of rows that do not count",
        "mask = jnp.arange(capacity) < self.num_records",
        "mask = jnp.arange(capacity) < capacity",
        (f"{HOSTILE}test_padding_reaches_nothing[scores]",),
    ),
    Mutant(
        "noise on changes, a fifth too little",
        "released = add_noise(noise_key, mean_or_sum, params.noise_std, like=each)",
        "released = add_noise(noise_key, mean_or_sum, 0.8 * params.noise_std, like=each)",
        (f"{SABOTAGE}test_a_release_is_the_weighted_sum_and_its_noise",),
    ),
    Mutant(
        "noise on changes, from a key that is no secret",
        "noise_key = by_purpose(visit.secret_key).noise",
        "noise_key = by_purpose(keys[0]).noise",
        (f"{SABOTAGE}test_a_release_is_the_weighted_sum_and_its_noise",),
    ),
    Mutant(
        "the mean over shards, without its weight",
        "mean_or_sum = arithmetic.weighted_total(each, params.weight)",
        "mean_or_sum = arithmetic.weighted_total(each, 1.0)",
        (f"{SABOTAGE}test_a_release_is_the_weighted_sum_and_its_noise",),
    ),
    Mutant(
        "one draw of noise for two leaves",
        "                start += leaf.size\n            else:",
        "                start += 0\n            else:",
        (f"{NOISE}TestLaw::test_is_independent_between_leaves_and_entries",),
    ),
    Mutant(
        "noise on what is asked for at times, a fifth too little",
        "return arithmetic.released(draws, total, noise_std, dtype)",
        "return arithmetic.released(draws, total, 0.8 * noise_std, dtype)",
        (f"{NOISE}TestAddNoise::test_what_is_asked_for_at_times_has_the_noise_of_all_else",),
    ),
    Mutant(
        "what is not asked for, released because another client is asked",
        "return jnp.where(asked, found, nothing)",
        "return found",
        (f"{NOISE}TestAddNoise::test_what_is_asked_for_at_times_has_the_noise_of_all_else",),
    ),
    Mutant(
        "noise drawn in 32 bits",
        "(half.astype(jnp.float64) for half in (words[0], words[1] >> 1))",
        "(half.astype(jnp.float32) for half in (words[0], words[1] >> 1))",
        (f"{EXACT}test_draws_are_right_to_the_last_bits",),
    ),
    Mutant(
        "noise of one sign",
        "jnp.where(words[1] & 1, -1.0, 1.0) * ndtri(tail)",
        "ndtri(tail)",
        (f"{EXACT}test_draws_are_right_to_the_last_bits",),
    ),
    Mutant(
        "noise whose tail is cut",
        "tail = (high + (low + 0.5) * 2.0**-31) * 2.0**-33",
        "tail = (high + 0.5) * 2.0**-33",
        (f"{EXACT}test_draws_are_right_to_the_last_bits",),
    ),
    Mutant(
        "a release that is not rounded to its grid",
        "on_grid = jnp.round(noisy / divisor) * divisor",
        "on_grid = noisy",
        (f"{EXACT}test_nothing_but_the_grid_is_possible",),
    ),
    Mutant(
        "a grid that the released value decides",
        "step = power_of_two(std, jnp.float64) * 2.0**-_RELEASE_BITS",
        "step = power_of_two(jnp.abs(noisy), jnp.float64) * 2.0**-_RELEASE_BITS",
        (f"{EXACT}test_nothing_but_the_grid_is_possible",),
    ),
    Mutant(
        "noise on sums of records, for one record of a person",
        'on every entry of the released sum."""\n'
        "        return self.noise_multiplier * self.contributions * self.clip_norm",
        'on every entry of the released sum."""\n'
        "        return self.noise_multiplier * self.clip_norm",
        (f"{UNITS}TestPlans::test_of_gradients_cover_all_records_of_a_person",),
    ),
    Mutant(
        "noise on sums of shards, for one shard of a unit",
        'before it is multiplied by the weight."""\n'
        "        return self.noise_multiplier * self.contributions * self.clip_norm",
        'before it is multiplied by the weight."""\n'
        "        return self.noise_multiplier * self.clip_norm",
        (f"{UNITS}TestPlans::test_of_changes_cover_all_shards_of_a_unit",),
    ),
)

_DISCRETE = (
    Mutant(
        "discrete noise of another scale",
        "scales = [std_in_steps(mine.unweighted_std, mine.clip_norm) for mine in sums]",
        "scales = [std_in_steps(mine.noise_std, mine.clip_norm) for mine in sums]",
        (f"{DISCRETE}TestLaw::test_what_is_released_has_the_plans_standard_deviation",),
    ),
    Mutant(
        "discrete noise that is not added",
        "totals.append(total + mine)",
        "totals.append(total)",
        (f"{DISCRETE}TestArithmetic",),
    ),
    Mutant(
        "discrete noise without its last bits",
        "flat = words[0] * 2.0**_LOW_BITS + words[1]",
        "flat = words[0] * 2.0**_LOW_BITS",
        (f"{DISCRETE}TestArithmetic",),
    ),
    Mutant(
        "discrete noise on numbers that are no integers",
        "return jnp.round(entries.astype(jnp.float64) / step.astype(jnp.float64))",
        "return entries.astype(jnp.float64) / step.astype(jnp.float64)",
        (f"{DISCRETE}TestArithmetic",),
    ),
    Mutant(
        "discrete noise, one draw for two leaves",
        "            start += total.size\n",
        "            start += 0\n",
        (f"{DISCRETE}TestArithmetic",),
    ),
    Mutant(
        "discrete noise, one draw for all visits",
        "noise = np.array([integers(scales[client], size) for client in visits])",
        "noise = np.array([integers(scales[visits[0]], size)] * len(visits))",
        (f"{DISCRETE}TestRuns::test_every_visit_has_fresh_noise_of_the_plans_size",),
    ),
    Mutant(
        "discrete noise, charged at half of its cost",
        "return dpa.ZCDpEvent(moved**2 / (2 * noise_multiplier**2))",
        "return dpa.ZCDpEvent(moved**2 / (4 * noise_multiplier**2))",
        (f"{DISCRETE}TestLaw::test_opendp_proves_what_is_charged",),
    ),
    Mutant(
        "discrete noise in shares",
        "            if self.num_shares > 1:\n",
        "            if False:\n",
        (f"{DISCRETE}TestRefusals::test_shares_of_noise",),
    ),
    Mutant(
        "discrete noise, changes clipped too late",
        "steps = clipped_in_steps(changes, present, params.clip_norm, visit.drawn.step)",
        "steps = clipped_in_steps(changes, present, 1.5 * params.clip_norm, visit.drawn.step)",
        (f"{SABOTAGE}test_no_kept_change_is_longer_than_the_clip",),
    ),
)

_CLIP = (
    Mutant(
        "a norm of its own for every leaf",
        "return functools.reduce(jnp.add, map(of_leaf, leaves)).astype(dtype)",
        "return functools.reduce(jnp.maximum, map(of_leaf, leaves)).astype(dtype)",
        (f"{CLIPPING}test_no_record_contributes_more_than_the_bound",),
    ),
    Mutant(
        "a norm that leaves a leaf out",
        "return functools.reduce(jnp.add, map(of_leaf, leaves)).astype(dtype)",
        "return functools.reduce(jnp.add, map(of_leaf, leaves[:1])).astype(dtype)",
        (f"{CLIPPING}test_no_record_contributes_more_than_the_bound",),
    ),
    Mutant(
        "a product's norm that forgets half of the rows before",
        "return (before + row[1], total + row[0] * before), None",
        "return (before + row[1], 0.5 * total + row[0] * before), None",
        (f"{CLIPPING}test_the_bound_holds_for_products_at_the_bound",),
    ),
    Mutant(
        "a layer's norm that forgets what cancels",
        "norms = (1 + (ROWS_PER_BLOCK + 1) * eps) * (jnp.sqrt(total) + moved) ** 2\n",
        "norms = total\n",
        (f"{LAYERS}test_where_terms_cancel_the_norm_is_no_smaller_than_what_rounding_may_leave",),
    ),
    Mutant(
        "a layer's norm of its inputs alone",
        "norms = sides[0] * sides[1]\n",
        "norms = sides[0]\n",
        (f"{LAYERS}test_a_record_moves_a_sum_by_no_more_than_the_clip",),
    ),
    Mutant(
        "a row's norm without its weight",
        "return jnp.where(_in_range(sides, dtype), sides[0] * sides[1], jnp.inf)",
        "return jnp.where(_in_range(sides, dtype), sides[1], jnp.inf)",
        (f"{CLIPPING}test_the_bound_holds_for_weighted_rows_at_the_bound",),
    ),
    Mutant(
        "a weight out of range that is kept",
        "jnp.where((factor > 0) & jnp.isfinite(weights), weights, 0)",
        "jnp.where(factor > 0, weights, 0)",
        (f"{CLIPPING}test_a_weight_that_overflows_when_it_is_scaled_leaves_the_row_out",),
    ),
    Mutant(
        "weighted rows that are added up without rounding",
        "entries = jnp.round(_scaled_rows(factor, leaf))",
        "entries = _scaled_rows(factor, leaf)",
        (
            f"{EXACT}test_removing_one_of_many_equal_products_moves_the_sum_by_no_more_than_the_norm",
        ),
    ),
    Mutant(
        "a layer's inputs out of range that are kept",
        "    left = jnp.where(jnp.isfinite(left), left, 0).reshape(leaf.left.shape)\n",
        "    left = left.reshape(leaf.left.shape)\n",
        (f"{LAYERS}test_a_side_that_overflows_when_it_is_scaled_leaves_the_record_out",),
    ),
    Mutant(
        "layers that are added up without rounding",
        "jnp.round(lefts[k][:, None] * _weighted(every, [right[k] for right in rights]))",
        "(lefts[k][:, None] * _weighted(every, [right[k] for right in rights]))",
        (f"{LAYERS}test_sums_do_not_depend_on_the_order_of_records",),
    ),
    Mutant(
        "products that are added up without rounding",
        "jnp.round(mine[:, k, None] * blocks[:, k])",
        "(mine[:, k, None] * blocks[:, k])",
        (
            f"{EXACT}test_removing_one_of_many_equal_products_moves_the_sum_by_no_more_than_the_norm",
        ),
    ),
    Mutant(
        "not finite times zero",
        "return jnp.where(factor[:, None] > 0, rows, 0)",
        "return rows",
        (f"{CLIPPING}test_a_record_with_one_bad_entry_contributes_nothing_and_spoils_nothing",),
    ),
    Mutant(
        "masked rows that count",
        "return jnp.where(mask & (squared > _least_square(leaves)), factor, 0.0)",
        "return jnp.where(squared > _least_square(leaves), factor, 0.0)",
        (f"{CLIPPING}test_masked_rows_count_for_nothing_whatever_they_hold",),
    ),
    Mutant(
        "no margin for the rounding of norms",
        "_ROUNDING_MARGIN = 1e-5",
        "_ROUNDING_MARGIN = 0.0",
        (f"{SABOTAGE}test_norms_that_round_down_do_not_break_the_bound",),
    ),
    Mutant(
        "no margin for the rounding of entries",
        "return float(num_entries**0.5 * (4 / 3) * 2.0 ** -(_ENTRY_BITS + 1))",
        "return 0.0",
        (f"{SABOTAGE}test_entries_that_all_round_up_do_not_break_the_bound",),
    ),
    Mutant(
        "squares that vanish count as nothing",
        "return jnp.where(mask & (squared > _least_square(leaves)), factor, 0.0)",
        "return jnp.where(mask, factor, 0.0)",
        (f"{CLIPPING}test_the_bound_holds_where_squares_vanish",),
    ),
    Mutant(
        "gradients clipped too late",
        "clipped_sum(gradients, mask, params.clip_norm, rounded=params.noise_std > 0)",
        "clipped_sum(gradients, mask, 1.5 * params.clip_norm, rounded=params.noise_std > 0)",
        (f"{UNEQUAL}test_every_sum_is_bounded_by_its_clients_own_clip",),
    ),
    Mutant(
        "white changes clipped too late",
        "each = clipped(changes, present, params.clip_norm)",
        "each = clipped(changes, present, params.clip_norm * (1.5 if rule else 1.0))",
        (f"{SABOTAGE}test_no_kept_change_is_longer_than_the_clip",),
    ),
    Mutant(
        "changes clipped too late",
        "each = clipped(changes, present, params.clip_norm)",
        "each = clipped(changes, present, params.clip_norm * (1.0 if rule else 1.5))",
        (f"{SABOTAGE}test_no_kept_change_is_longer_than_the_clip",),
    ),
)

_ROUNDING = (
    Mutant(
        "entries that are not rounded",
        "units = jnp.where(rounded, 2.0**_ENTRY_BITS, finest).astype(dtype)",
        "units = jnp.asarray(finest, dtype)",
        (f"{EXACT}test_entries_are_multiples_of_a_step_that_the_clipping_norm_alone_decides",),
    ),
    Mutant(
        "rounding that clients leave out",
        "clipped_sum(gradients, mask, params.clip_norm, rounded=params.noise_std > 0)",
        "clipped_sum(gradients, mask, params.clip_norm, rounded=False)",
        (f"{SABOTAGE}test_sums_that_get_noise_are_exact",),
    ),
    Mutant(
        "sums in 32 bits",
        "return grid.unit * total.reshape(blocks.shape[1:])",
        "return grid.unit * jnp.sum(blocks, axis=0)",
        (f"{EXACT}test_removing_one_of_many_equal_vectors_moves_the_sum_by_no_more_than_the_norm",),
    ),
    Mutant(
        "chunks that are added in 32 bits",
        "return jax.tree.map(jnp.add, one, other)",
        "return jax.tree.map(lambda a, b: (a + b).astype(jnp.float32).astype(a.dtype), one, other)",
        (f"{SABOTAGE}test_sums_that_get_noise_are_exact",),
    ),
)

_KEYS = (
    Mutant(
        "one key for noise and batch",
        "return Purposes(*jax.random.split(secret_key))",
        "return Purposes(*[jax.random.split(secret_key)[0]] * 2)",
        (f"{NOISE}TestSecretKeys::test_purposes_have_keys_of_their_own",),
    ),
    Mutant(
        "keys of no entropy",
        "return _key(secrets.token_bytes(num_bytes), generator)",
        "return _key(bytes(num_bytes), generator)",
        (f"{NOISE}TestSecretKeys",),
    ),
    Mutant(
        "keys of half the entropy",
        "return _key(secrets.token_bytes(num_bytes), generator)",
        "return _key(2 * secrets.token_bytes(num_bytes // 2), generator)",
        (f"{NOISE}TestSecretKeys",),
    ),
    Mutant(
        "a seeded key for all rounds",
        'text = f"numpyro_dppvi noise seed {self.insecure_seed} round {round_number}"',
        'text = f"numpyro_dppvi noise seed {self.insecure_seed}"',
        (f"{NOISE}TestSecretKeys",),
    ),
    Mutant(
        "the first round's key for all rounds",
        "keys = (key, setup.secret_keys.round_key(state.round))\n        before",
        "keys = (key, setup.secret_keys.round_key(0))\n        before",
        (f"{ALGORITHM}test_clients_and_rounds_get_noise_of_their_own",),
    ),
    Mutant(
        "the public key for noise",
        "keys = (key, setup.secret_keys.round_key(state.round))\n        before",
        "keys = (key, key)\n        before",
        (f"{NOISE}test_the_noise_of_a_fit_does_not_derive_from_its_rng_key",),
    ),
    Mutant(
        "one key for all groups",
        "        round_key = jax.random.fold_in(round_key, group)",
        "        pass",
        (f"{KEY_USE}test_no_secret_key_is_used_twice[full batches, at their own pace]",),
    ),
    Mutant(
        "one key for all clients",
        "return jax.random.fold_in(round_key, client)",
        "return round_key",
        (f"{KEY_USE}test_no_secret_key_is_used_twice[a joint sum over shards]",),
    ),
    Mutant(
        "one key for all local steps",
        "jax.vmap(by_purpose)(jax.random.split(visit.secret_key, visit.num_steps))",
        "jax.vmap(by_purpose)(jnp.broadcast_to(visit.secret_key, (visit.num_steps,)))",
        (f"{KEY_USE}test_no_secret_key_is_used_twice[Poisson batches, in turn]",),
    ),
    Mutant(
        "one key for all clients of a global step",
        "return jax.random.fold_in(round_key, client)",
        "return round_key if problem.method.central else jax.random.fold_in(round_key, client)",
        (f"{KEY_USE}test_no_secret_key_is_used_twice[global steps]",),
    ),
    Mutant(
        "one key for all runs of a compiled step",
        "if traced or isinstance(jnp.zeros(()), jax.core.Tracer):",
        "if False:",
        ("tests/test_transformations.py::test_a_step_is_refused_before_it_is_charged",),
    ),
    Mutant(
        "keys that share blocks of the cipher",
        "_BITS, _SPLIT, _FOLD = 1, 2, 3",
        "_BITS, _SPLIT, _FOLD = 1, 1, 1",
        ("tests/privacy/test_chacha.py::TestGenerator",),
    ),
)

_SAMPLER = (
    Mutant(
        "coins from a fixed key",
        "words = _words(rng_key, num_records, capacity)\n        below",
        "words = _words(jax.random.key(0), num_records, capacity)\n        below",
        (f"{SAMPLING}TestPoissonBatch::test_is_a_function_of_the_key",),
    ),
    Mutant(
        "the first rows that fit, whatever the coins say",
        "return _smallest(mine, physical_size), ",
        "return jnp.arange(physical_size, dtype=jnp.int32), ",
        (f"{SAMPLING}TestPoissonBatch::test_the_smallest_words_stay",),
    ),
    Mutant(
        "a threshold that is rounded up",
        "threshold = jnp.floor(below * 2**_BITS).astype(jnp.uint32)",
        "threshold = jnp.ceil(below * 2**_BITS).astype(jnp.uint32)",
        (f"{SAMPLING}TestPoissonBatch",),
    ),
    Mutant(
        "a probability that is rounded up",
        "below = jnp.nextafter(jnp.asarray(inclusion_prob), 0)",
        "below = jnp.asarray(inclusion_prob)",
        (f"{SAMPLING}TestPoissonBatch",),
    ),
    Mutant(
        "padding among the batch",
        "return jnp.where(jnp.arange(capacity) < num_records, words, jnp.uint32(2**_BITS))",
        "return words",
        (f"{SAMPLING}TestPoissonBatch::test_never_holds_padding_nor_a_row_twice",),
    ),
    Mutant(
        "the same batch of fixed size each time",
        "rows = ranked[: self.batch_size]",
        "rows = jnp.arange(self.batch_size)",
        (f"{SAMPLING}TestFixedSizeLaw",),
    ),
    Mutant(
        "truncation that is not told",
        "if physical_size >= num_records:",
        "if True:",
        (f"{SAMPLING}TestEvents",),
    ),
    Mutant(
        "half of Poisson's probability in the accountant",
        "sampling_prob=event.sampling_probability,",
        "sampling_prob=event.sampling_probability / 2,",
        (
            f"{ACCOUNTING}TestExactAnswers::"
            "test_one_poisson_release_costs_the_integral_over_its_worst_pair",
        ),
    ),
    Mutant(
        "half of a truncated batch's probability in the accountant",
        "            event.sampling_probability,\n            event.truncated_batch_size,",
        "            event.sampling_probability / 2,\n            event.truncated_batch_size,",
        (f"{ACCOUNTING}TestTruncation",),
    ),
    Mutant(
        "half of a fixed batch's probability in the accountant",
        "prob = event.sample_size / event.source_dataset_size",
        "prob = event.sample_size / event.source_dataset_size / 2",
        (f"{ACCOUNTING}TestFixedSize::test_lies_between_poisson_and_the_renyi_bound",),
    ),
    Mutant(
        "the size of a batch, divided by",
        "lambda leaf: leaf / params.inclusion_prob.astype(leaf.dtype), noisy)",
        "lambda leaf: leaf / (jnp.sum(batch.mask) / self.num_records), noisy)",
        (f"{AUDIT}test_the_size_of_a_batch_enters_nothing_but_the_sum",),
    ),
)

_ACCOUNTANT = (
    Mutant(
        "a sensitivity of half its size",
        'return 2.0 if relation == "replace_one" else 1.0',
        "return 1.0",
        (f"{BUDGET}test_replacing_a_record_moves_a_sum_twice_as_far_as_adding_one",),
    ),
    Mutant(
        "Gaussians that cost what adding a record does",
        "return math.sqrt(sum(count * (unit / multiplier) ** 2 for multiplier, count in noise))",
        "return math.sqrt(sum(count * (1 / multiplier) ** 2 for multiplier, count in noise))",
        (f"{ACCOUNTING}TestExactAnswers::test_full_batches_cost_the_closed_form",),
    ),
    Mutant(
        "equal events that count once",
        "counts[event] = counts.get(event, 0) + count",
        "counts[event] = count",
        (f"{LEDGER}TestCounting",),
    ),
    Mutant(
        "many Gaussians among sampled batches, charged as one",
        "event.noise_multiplier / math.sqrt(count),",
        "event.noise_multiplier,",
        (f"{ACCOUNTING}TestExactAnswers::test_a_mixed_history_is_composed",),
    ),
    Mutant(
        "many sampled batches, charged as one",
        "return one.self_compose(count)",
        "return one",
        (f"{ACCOUNTING}TestExactAnswers::test_a_mixed_history_is_composed",),
    ),
    Mutant(
        "probability that is lost to rounding",
        "safe_delta = delta - rounding_error(composition)",
        "safe_delta = delta",
        (f"{ACCOUNTING}TestExactAnswers::test_rounding_never_makes_it_too_small",),
    ),
    Mutant(
        "concentrated Gaussians that cost what adding a record does",
        "return 0.5 * (unit_sensitivity(relation) / noise) ** 2 if noise > 0 else math.inf",
        "return 0.5 * (1 / noise) ** 2 if noise > 0 else math.inf",
        (f"{CONCENTRATED}TestEpsilon",),
    ),
)

_CHARGING = (
    Mutant(
        "releases in the order of clients' sizes",
        "    back = jnp.argsort(order)\n",
        "    back = jnp.arange(order.size)\n",
        ("tests/test_chunks.py::test_clients_who_share_a_batch_by_size_come_back_in_their_order",),
    ),
    Mutant(
        "a release of a client who is not visited, from a free place on its device",
        "        released = jax.tree.map(present, Release(outcomes.release, outcomes.failed))\n",
        "        released = Release(outcomes.release, outcomes.failed)\n",
        ("tests/test_devices.py::test_nothing_leaves_a_place_without_a_client",),
    ),
    Mutant(
        "a charge after the release",
        """        ledger = charged(state.ledger, plan, state.round, groups, ledger_file)
        key = _fold_in(_validate.rng_key(rng_key), state.round)
        keys = (key, setup.secret_keys.round_key(state.round))
        before, drawn = RoundState(state.server, state.clients), _drawn(setup, groups, state)
        spread = isinstance(shards, SpreadShards)
        run_round: Any = devices.run_round if spread else rounds.run_round
        end, info = run_round(problem, params, before, shards, jax.device_put(groups), keys, drawn)
""",
        """        key = _fold_in(_validate.rng_key(rng_key), state.round)
        keys = (key, setup.secret_keys.round_key(state.round))
        before, drawn = RoundState(state.server, state.clients), _drawn(setup, groups, state)
        spread = isinstance(shards, SpreadShards)
        run_round: Any = devices.run_round if spread else rounds.run_round
        end, info = run_round(problem, params, before, shards, jax.device_put(groups), keys, drawn)
        ledger = charged(state.ledger, plan, state.round, groups, ledger_file)
""",
        (f"{LEDGER_FILE}TestFit::test_every_round_is_on_the_disk_before_it_runs",),
    ),
    Mutant(
        "global steps that are not charged",
        "ledger = charged(state.ledger, plan, state.round, groups, ledger_file)",
        "ledger = state.ledger if problem.method.central else "
        "charged(state.ledger, plan, state.round, groups, ledger_file)",
        (f"{LEDGER_FILE}TestFit::test_every_round_is_on_the_disk_before_it_runs",),
    ),
    Mutant(
        "two visits of a round, charged as one",
        "visits[m] * mine.releases_per_visit, run)\n",
        "mine.releases_per_visit, run)\n",
        (f"{DISCRETE}TestRuns::test_clients_may_join_late_or_drop_out[asynchronous]",),
    ),
    Mutant(
        "the steps of a visit, charged as one",
        "visits[m] * mine.releases_per_visit, run)\n",
        "visits[m], run)\n",
        (f"{KEY_USE}test_no_secret_key_is_used_twice[Poisson batches, in turn]",),
    ),
    Mutant(
        "noise for one visit",
        "num_releases=max(1, visits * releases_per_visit)",
        "num_releases=max(1, releases_per_visit)",
        (f"{UNITS}TestPlans::test_of_gradients_cover_all_records_of_a_person",),
    ),
    Mutant(
        "noise on changes for one visit",
        "_noise_of_changes(noise_law, budget, max(1, visits), spent",
        "_noise_of_changes(noise_law, budget, 1, spent",
        (f"{UNITS}TestPlans::test_of_changes_cover_all_shards_of_a_unit",),
    ),
    Mutant(
        "a budget that may be exceeded a little",
        "if not epsilon <= budget.epsilon:",
        "if not epsilon <= 1.001 * budget.epsilon:",
        (f"{LEDGER}test_a_refusal_never_shows_equal_numbers",),
    ),
    Mutant(
        "a budget that nobody looks at",
        "for client in sorted({entry.client for entry in entries}):",
        "for client in ():",
        (f"{LEDGER}TestRefusal",),
    ),
    Mutant(
        "a ledger that forgets a client",
        "for client, events in more.items():\n",
        "for client, events in list(more.items())[:-1]:\n",
        (f"{LEDGER}TestSpent",),
    ),
    Mutant(
        "a plan beyond its budget that is waved through",
        "return within and _cost(planned, budget) <= budget.epsilon",
        "return within",
        (f"{LEDGER}TestAffordable::test_a_plan_beyond_its_budget_opens_no_door",),
    ),
    Mutant(
        "a plan that lasts for ever",
        "within = all(count <= counts.get(event, 0) for event, count in composition)",
        "within = all(event in counts for event, count in composition)",
        (f"{LEDGER}TestAffordable::test_a_whole_plan_can_be_carried_out_and_not_more[shards]",),
    ),
    Mutant(
        "negative charges",
        '_validate.positive_int("num_releases", entry.num_releases)',
        "entry.num_releases",
        (f"{LEDGER}TestRefusal::test_of_less_than_one_release",),
    ),
    Mutant(
        "a charge that is not flushed to the disk",
        "        file.flush()\n        os.fsync(file.fileno())\n        self._seen",
        "        file.flush()\n        self._seen",
        (f"{LEDGER_FILE}TestWhatIsWritten::test_is_synced_before_charge_returns",),
    ),
    Mutant(
        "a ledger file that others' charges do not count in",
        "charged = _caught_up(self.path, ledger, seen).charge(entries)",
        "charged = ledger.charge(entries)",
        (f"{LEDGER_FILE}TestWhatCounts::test_two_runs_at_the_same_time_share_the_budget",),
    ),
)

_PRIVATE_STATE = (
    Mutant(
        "private state in the result",
        "clients=done.state.clients._replace(private=None),",
        "clients=done.state.clients,",
        (f"{METHODS}test_q_is_a_product_of_released_factors_and_a_result_keeps_no_private_one",),
    ),
    Mutant(
        "private state in the checkpoint",
        'parts = {**state.server._asdict(), "pulled": state.clients.pulled}',
        "parts = {**state.server._asdict(), **state.clients._asdict()}",
        (f"{CHECKPOINT}test_what_clients_keep_is_in_a_file_of_its_own",),
    ),
    Mutant(
        "a private file that anybody may read",
        '_files.flatten(private, "private"),\n                owner_only=True,',
        '_files.flatten(private, "private"),\n                owner_only=False,',
        (f"{CHECKPOINT}test_what_clients_keep_is_in_a_file_of_its_own",),
    ),
    Mutant(
        "private factors that follow a refused merge",
        "share = jnp.where(info.rejected, 0.0, params.damping)",
        "share = params.damping",
        (f"{SABOTAGE}test_a_refused_merge_happened_nowhere",),
    ),
    Mutant(
        "private factors that follow the noise",
        "kept = jax.vmap(in_natural)(each) if layout.private else None",
        "each = jax.tree.map(lambda e, r: e + r - jnp.sum(e, 0), each, released)\n"
        "    kept = jax.vmap(in_natural)(each) if layout.private else None",
        (f"{SABOTAGE}test_private_factors_do_not_see_the_noise",),
    ),
    Mutant(
        "private factors that follow what was not clipped",
        "kept = jax.vmap(in_natural)(each) if layout.private else None",
        "kept = jax.vmap(in_natural)(changes) if layout.private else None",
        (f"{SABOTAGE}test_no_kept_change_is_longer_than_the_clip",),
    ),
    Mutant(
        "private factors without damping",
        "factors.power(kept, answer.share)",
        "factors.power(kept, answer.share > 0)",
        (f"{SABOTAGE}test_a_shard_shows_nothing_but_its_own_clipped_change",),
    ),
    Mutant(
        "private factors that a client's shards share",
        "factors.power(kept, answer.share)",
        "jax.tree.map(lambda leaf: answer.share * leaf.mean(0, keepdims=True), kept)",
        (f"{SABOTAGE}test_a_shard_shows_nothing_but_its_own_clipped_change",),
    ),
    Mutant(
        "cavities of other shards' private factors",
        "changes = jax.vmap(change_of, (0, 0 if layout.private else None))(numbers, visit.own)",
        "own = jax.tree.map(lambda x: jnp.roll(x, 1, 0) if layout.private else x, visit.own)\n"
        "    changes = jax.vmap(change_of, (0, 0 if layout.private else None))(numbers, own)",
        (f"{SABOTAGE}test_a_shard_shows_nothing_but_its_own_clipped_change",),
    ),
    Mutant(
        "solves that start from a private q",
        "q=request.q if state.pulled is None else state.pulled",
        "q=request.q if state.private is None else "
        "factors.multiply(request.q, factors.total(state.private))",
        (f"{SABOTAGE}test_a_shard_shows_nothing_but_its_own_clipped_change",),
    ),
    Mutant(
        "a merge that private state refuses",
        "    clients = client.settle_many(now.clients, numbers, outcomes.kept, answer)\n",
        "    if now.clients.private is not None:\n"
        "        mine = server.factors.total(server.factors.total(now.clients.private))\n"
        "        good = problem.family.in_domain(server.factors.multiply(known.prior, mine))\n"
        "        both = (known.factors, now.server.factors)\n"
        "        known = known._replace(factors=server.factors.select(good, *both))\n"
        "    clients = client.settle_many(now.clients, numbers, outcomes.kept, answer)\n",
        (f"{SABOTAGE}test_a_shard_shows_nothing_but_its_own_clipped_change",),
    ),
    Mutant(
        "shards whose solves failed, told",
        "return Outcome(in_natural(released), kept, hidden)",
        "return Outcome(in_natural(released), kept, ~factors.is_finite(changes))",
        (f"{SABOTAGE}test_a_shard_that_fails_is_not_told",),
    ),
    Mutant(
        "a history of private state",
        "movement = problem.family.jeffreys(q, server.from_totals(now.server.prior, turn.totals))",
        "shown = now.clients.private\n"
        "    shown = now.server.factors if shown is None else "
        "jax.tree.map(lambda x: x.sum(1), shown)\n"
        "    shown = server.approximation(now.server.prior, shown)\n"
        "    movement = problem.family.jeffreys(q, shown)",
        (f"{ONLY_RELEASES}test_what_clients_keep_to_themselves_would_be_found",),
    ),
)

_WHITE = (
    Mutant(
        "changes measured where private factors are",
        "return visit.solver.measured(family, visit.q, change)",
        "return visit.solver.measured(family, factors.multiply(visit.q, own), change)",
        (f"{SABOTAGE}test_a_change_within_the_clip_is_what_the_solve_found",),
    ),
    Mutant(
        "noise unmeasured where private factors are",
        "return visit.solver.unmeasured(family, visit.q, change)",
        "own = factors.total(visit.own) if layout.private else factors.unit(visit.q)\n"
        "        return visit.solver.unmeasured(family, factors.multiply(visit.q, own), change)",
        (f"{SABOTAGE}test_a_shard_shows_nothing_but_its_own_clipped_change",),
    ),
    Mutant(
        "white lengths without the spread's weight",
        "return whitening.weighted(white, weights, self.spread_weight)",
        "return whitening.weighted(white, weights, 1.0)",
        (f"{SABOTAGE}test_a_change_within_the_clip_is_what_the_solve_found",),
    ),
    Mutant(
        "changes that are noised as they were measured",
        "return Outcome(in_natural(released), kept, hidden)",
        "return Outcome(released, kept, hidden)",
        (f"{SABOTAGE}test_a_shard_shows_nothing_but_its_own_clipped_change",),
    ),
)

_AGGREGATOR = (
    Mutant(
        "shares of noise that are too small",
        "return self.noise_std / math.sqrt(self.num_shares)\n\n    @property\n"
        "    def dp_event(self) -> dpa.DpEvent:\n"
        '        """The accounting event of one release, with noise in units of a '
        'contribution."""\n'
        "        # Weight",
        "return self.noise_std / self.num_shares\n\n    @property\n"
        "    def dp_event(self) -> dpa.DpEvent:\n"
        '        """The accounting event of one release, with noise in units of a '
        'contribution."""\n'
        "        # Weight",
        (f"{METHODS}test_with_an_aggregator_each_share_falls_and_the_sum_stays",),
    ),
    Mutant(
        "everyone's own noise in a sum of changes",
        "        noise = [max(noise)] * len(noise)\n",
        "        noise = list(noise)\n",
        (f"{SABOTAGE}test_joint_noise_keeps_the_smallest_budget",),
    ),
    Mutant(
        "everyone's own noise in a sum of gradients",
        "noise, contributions = [max(noise)] * len(noise), [max(contributions)] * len(noise)",
        "noise, contributions = list(noise), [max(contributions)] * len(noise)",
        (f"{SABOTAGE}test_joint_noise_keeps_the_smallest_budget",),
    ),
    Mutant(
        "everyone's own unit in a sum of changes",
        "        contributions = [max(contributions)] * len(noise)\n",
        "        contributions = list(contributions)\n",
        (f"{SABOTAGE}test_joint_noise_keeps_the_smallest_budget",),
    ),
    Mutant(
        "everyone's own unit in a sum of gradients",
        "noise, contributions = [max(noise)] * len(noise), [max(contributions)] * len(noise)",
        "noise, contributions = [max(noise)] * len(noise), list(contributions)",
        (f"{SABOTAGE}test_joint_noise_keeps_the_smallest_budget",),
    ),
    Mutant(
        "everyone's own weight in a sum over clients",
        "return [max(weight * (clip / mine) for clip, weight in each) for mine in clip_norms]",
        "return weights",
        (f"{METHODS}test_unequal_shards_under_an_aggregator_are_covered_by_the_largest_weight",),
    ),
    Mutant(
        "drop-outs whose share is counted on",
        "return num_clients - self.max_dropouts",
        "return num_clients",
        (f"{METHODS}test_with_an_aggregator_each_share_falls_and_the_sum_stays",),
    ),
    Mutant(
        "a sum over clients of the first one's change",
        "    if problem.aggregated:\n",
        "    if False:\n",
        (f"{NATURAL}test_without_clip_shards_of_one_record_are_exact[True-virtual]",),
    ),
    Mutant(
        "factors of single clients under an aggregator",
        "each = initial.of_clients(prior, held, num_factors)",
        "each = initial.of_clients(prior, held, num_clients)",
        (f"{METHODS}test_q_is_a_product_of_released_factors_and_a_result_keeps_no_private_one",),
    ),
)

_REFUSALS = (
    Mutant(
        "another run's plan",
        "if found.get(name) != value:",
        "if False:",
        (f"{ALGORITHM}test_a_plan_of_another_run_is_refused",),
    ),
    Mutant(
        "another run's records",
        "if sizes != [int(size) for size in client_sizes]:",
        "if len(sizes) != len(client_sizes):",
        (f"{ALGORITHM}test_records_of_other_clients_than_planned_are_refused",),
    ),
    Mutant(
        "shards where records come and go",
        '        if relation != "replace_one":\n',
        "        if False:\n",
        (f"{PLAN}TestPlan::test_shards_are_for_replacing_records_only",),
    ),
    Mutant(
        "batches of a fixed size where records come and go",
        'SampledWithoutReplacementDpEvent) and relation != "replace_one":',
        "SampledWithoutReplacementDpEvent) and False:",
        (f"{ACCOUNTING}TestFixedSize::test_is_refused_where_records_come_and_go",),
    ),
    Mutant(
        "sampled batches of persons",
        'if isinstance(sampler, FullBatch) or in_words(budget) == "record":',
        "if True:",
        (f"{UNITS}TestRefusals::test_sampled_batches_are_for_single_records",),
    ),
    Mutant(
        "too few shares of noise in a round",
        "if groups.shape[0] != 1 or present < self.num_shares(num_clients):",
        "if groups.shape[0] != 1:",
        (f"{METHODS}test_an_aggregator_is_refused_where_it_cannot_work",),
    ),
    Mutant(
        "several sums in a round of shared noise",
        "if groups.shape[0] != 1 or present < self.num_shares(num_clients):",
        "if groups.size < self.num_shares(num_clients):",
        (f"{METHODS}test_an_aggregator_is_refused_where_it_cannot_work",),
    ),
    Mutant(
        "unequal clips in a sum over clients",
        "if len(set(clip_norms)) > 1:",
        "if False:",
        ("tests/test_bad_input.py::TestPieces::test_clients_of_one_sum_are_alike",),
    ),
    Mutant(
        "unequal probabilities in a sum over clients",
        "    if len(probs) > 1:\n",
        "    if False:\n",
        (f"{UNITS}TestPlans::test_a_sum_over_clients_wants_one_share_of_everyones_records",),
    ),
    Mutant(
        "a failed solve that is shown",
        "return Outcome(factors.select(finite, change, factors.unit(change)), None, ~finite)",
        "return Outcome(change, None, ~finite)",
        (f"{SABOTAGE}test_a_solve_that_fails_sends_nothing",),
    ),
)

_UNITS = (
    Mutant(
        "one record of a person",
        "    return budget.max_records_per_person\n",
        "    return 1\n",
        (f"{UNITS}TestHowManyChange::test_records",),
    ),
    Mutant(
        "one shard of a person",
        "return min(budget.max_records_per_person, num_shards)",
        "return 1",
        (f"{UNITS}TestHowManyChange::test_shards",),
    ),
    Mutant(
        "one shard of a client",
        "        return num_shards\n    return min(budget",
        "        return 1\n    return min(budget",
        (f"{UNITS}TestHowManyChange::test_all_shards_of_a_client",),
    ),
    Mutant(
        "a mechanism for less than the unit",
        "    if changed > accounted:\n",
        "    if False:\n",
        (f"{UNITS}TestRefusals::test_a_mechanism_for_less_than_the_unit",),
    ),
)

_ROWS = (
    Mutant(
        "padding that counts as records",
        "return Batch(None, jnp.arange(capacity) < num_records)",
        "return Batch(None, jnp.arange(capacity) < capacity)",
        (f"{SAMPLING}test_a_full_batch_is_every_record_and_no_padding",),
    ),
    Mutant(
        "padding in a shard",
        "present = (places < self.num_records) & (number < num_shards)",
        "present = (places >= 0) & (number < num_shards)",
        (
            f"{METHODS}test_in_a_conjugate_family_the_number_of_shards_does_not_matter[VirtualClients-num_shards2]",
        ),
    ),
    Mutant(
        "other clients' records, which lie behind a client's own",
        "return jnp.where(keep, rows, jnp.zeros((), leaf.dtype))",
        "return rows",
        (f"{END_TO_END}test_every_client_has_its_own_records_and_zeros[sizes0]",),
    ),
    Mutant(
        "other clients' records, multiplied by zero",
        "return jnp.where(keep, rows, jnp.zeros((), leaf.dtype))",
        "return rows * keep.astype(leaf.dtype)",
        (f"{END_TO_END}test_every_client_has_its_own_records_and_zeros[sizes0]",),
    ),
    Mutant(
        "slices of records that end behind the last row, and are moved",
        "order = np.r_[:last, last + 1 : len(sizes), last]",
        "order = np.arange(len(sizes))",
        (f"{END_TO_END}test_every_client_has_its_own_records_and_zeros[sizes0]",),
    ),
    Mutant(
        "rows past a shard's end, taken from the client's last record",
        "places = jnp.where(present, places, first)",
        "places = jnp.minimum(places, self.num_records - 1)",
        (f"{HOSTILE}test_no_record_moves_a_release_by_more_than_its_sensitivity[virtual]",),
    ),
    Mutant(
        "rows that do not count, added up all the same",
        "return jnp.sum(jnp.where(present, jax.vmap(of_row)(dict(rows)), 0))",
        "return jnp.sum(jax.vmap(of_row)(dict(rows)))",
        (
            f"{METHODS}test_in_a_conjugate_family_the_number_of_shards_does_not_matter[VirtualClients-num_shards2]",
        ),
    ),
    Mutant(
        "shards that a client does not have",
        "    present = numbers < params.num_shards\n",
        "    present = numbers >= 0\n",
        (f"{METHODS}test_virtual_clients_without_privacy_are_so_many_synchronous_clients",),
    ),
    Mutant(
        "records that are in two shards",
        "places = number + num_shards * jnp.arange(self.layout.shard_capacity)",
        "places = number + jnp.arange(self.layout.shard_capacity)",
        (f"{METHODS}test_virtual_clients_without_privacy_are_so_many_synchronous_clients",),
    ),
)

_SELECTION = (
    Mutant(
        "the best of several runs, charged as one",
        "accountant.compose(runs.dp_event(dpa.GaussianDpEvent(1 / mu)))",
        "accountant.compose(dpa.GaussianDpEvent(1 / mu))",
        (f"{SELECTION}TestCost::test_is_the_theorem",),
    ),
    Mutant(
        "a run that takes the score's share, too",
        "fit_mus = [math.sqrt(1 - share) * mu for mu in mus]",
        "fit_mus = list(mus)",
        (f"{SELECTION}TestPlan::test_keeps_the_budget_and_uses_it",),
    ),
    Mutant(
        "scores with noise for adding a record",
        "noise = 0.0 if mu == math.inf else unit_sensitivity(budget.relation) / mu",
        "noise = 0.0 if mu == math.inf else 1 / mu",
        (f"{SELECTION}TestPlan::test_keeps_the_budget_and_uses_it",),
    ),
    Mutant(
        "runs beyond their share",
        "if not mu <= allowed * (1 + _ROUNDING):",
        "if not mu <= allowed * 1.02:",
        (f"{SELECTION}TestPlan::test_refuses_runs_beyond_it",),
    ),
    Mutant(
        "runs that nobody checks",
        "        _check(run, plan)\n",
        "",
        (f"{SELECT}TestRefusals::test_a_run_with_a_larger_budget",),
    ),
    Mutant(
        "scores without noise",
        "return np.asarray(add_noise(rng_key, exact, mechanism.share_std))",
        "return np.asarray(exact)",
        (
            f"{SELECT}TestScores::test_have_the_noise_that_is_planned",
            f"{SCORE}test_noise_is_as_large_as_is_said",
        ),
    ),
    Mutant(
        "scores with the same noise at every client",
        "key = jax.random.fold_in(secret_key, client)",
        "key = secret_key",
        (f"{SELECT}TestScores::test_have_the_noise_that_is_planned",),
    ),
    Mutant(
        "scores that are not clipped",
        "exact = clipped_sum(vectors, mask, mechanism.clip_norm)",
        "exact = clipped_sum(vectors, mask, 1e6 * mechanism.clip_norm)",
        (f"{SELECT}TestScores::test_one_record_moves_them_by_no_more_than_the_sensitivity",),
    ),
    Mutant(
        "held-back records scored with the same noise at every client",
        "key = jax.random.fold_in(secret_key, number)",
        "key = secret_key",
        (f"{SCORE}test_clients_and_seeds_have_noise_of_their_own",),
    ),
    Mutant(
        "held-back records scored before the ledger knows",
        "    ledger = algorithm.charged(ledger, planned, 0, np.arange(len(sizes)), file)\n",
        "",
        (f"{SCORE}test_a_ledger_file_is_charged_before_anything_is_computed",),
    ),
    Mutant(
        "held-back records scored beyond the public range",
        "(jnp.clip(known, low, high) - (low + high) / 2)",
        "(known - (low + high) / 2)",
        (f"{SCORE}TestWithoutNoise::test_what_is_clipped_is_counted",),
    ),
    Mutant(
        "noise for a longer vector than held-back records have",
        "return math.sqrt(1 + num_counts * _COUNT**2)",
        "return 2 * math.sqrt(1 + num_counts * _COUNT**2)",
        (f"{SCORE}test_the_sensitivity_is_reached",),
    ),
    Mutant(
        "a number of runs that anybody can compute",
        "for number in range(plan.runs.count(_uniform(keys.round_key(0)))):",
        "for number in range(plan.runs.count(0.5)):",
        (f"{SELECT}test_the_number_of_runs_settings_and_keys_are_secret",),
    ),
    Mutant(
        "the best by its true score",
        "value = _noisy_score(score(run), plan.mechanisms, noise_key)",
        "value = _noisy_score(score(run), [dataclasses.replace(m, noise_multiplier=0.0) "
        "for m in plan.mechanisms], noise_key)",
        (f"{SABOTAGE}test_the_score_that_is_compared_and_shown_has_noise",),
    ),
)

# One client as a value of its own, outside a compiled round.
_ALONE = (
    Mutant(
        "a client on its own that is not charged",
        "return self.charged(request).released(request)",
        "return self.released(request)",
        (f"{CLIENT}test_a_client_is_charged_before_it_computes",),
    ),
    Mutant(
        "a client on its own that forgets its charges",
        "return dataclasses.replace(self, ledger=self._charged(int(request.round)))",
        "return self if self._charged(int(request.round)) else self",
        (f"{CLIENT}test_a_client_refuses_what_its_budget_does_not_cover",),
    ),
    Mutant(
        "a client on its own that leaves the ledger file out",
        "return self.ledger_file.charge(self.ledger, [entry])",
        "return self.ledger.charge([entry])",
        (f"{CLIENT}test_a_client_is_charged_before_it_computes",),
    ),
    Mutant(
        "a client on its own, the steps of a visit charged as one",
        "event, count = self.plan.mechanism.dp_event, self.plan.releases_per_visit",
        "event, count = self.plan.mechanism.dp_event, 1",
        (f"{CLIENT}test_one_client_at_a_time_is_the_compiled_round[full batches]",),
    ),
    Mutant(
        "a client on its own with one key for all rounds",
        "round_key = self.secret_keys.round_key(number)",
        "round_key = self.secret_keys.round_key(0)",
        (f"{CLIENT}test_one_client_at_a_time_is_the_compiled_round[full batches]",),
    ),
    Mutant(
        "clients on their own with one key for all of them",
        "secret_key_of_visit(self.problem, round_key, group=group, client=self.number)",
        "secret_key_of_visit(self.problem, round_key, group=group, client=0)",
        (f"{CLIENT}test_one_client_at_a_time_is_the_compiled_round[full batches]",),
    ),
    Mutant(
        "a client on its own with one key for all groups of a round",
        "secret_key_of_visit(self.problem, round_key, group=group, client=self.number)",
        "secret_key_of_visit(self.problem, round_key, group=0, client=self.number)",
        (f"{CLIENT}test_one_client_at_a_time_is_the_compiled_round[at their own pace]",),
    ),
    Mutant(
        "a client on its own without the noise that the host draws",
        "return draw_noise([self.plan.mechanism], np.asarray(0), size)",
        "drawn = draw_noise([self.plan.mechanism], np.asarray(0), size)\n"
        "        return drawn._replace(high=0 * drawn.high, low=0 * drawn.low)",
        (f"{CLIENT}test_discrete_noise_is_drawn_by_the_client",),
    ),
)

_CONTINUED = (
    Mutant(
        "a prior of the records that shaped it, in spite of the ledger",
        "again = sorted(charged & set(visited))",
        "again = [0][1:]",
        (f"{COUNTED}TestOneLedgerFile::test_is_refused_before_anything_is_charged",),
    ),
    Mutant(
        "a prior of the records that shaped the one before it",
        "runs = list(dict.fromkeys([*([ledger_run] if ledger_run else []), *_runs(prior)]))",
        "runs = [ledger_run] if ledger_run else []",
        (f"{COUNTED}TestOneLedgerFile::test_also_from_a_file_and_where_other_studies_lie_between",),
    ),
    Mutant(
        "continued: noise that forgets the rounds before",
        "before = [accounting.compose([*a, *b]) for a, b in zip(others, earlier, strict=True)]",
        "before = [accounting.compose(a) for a, b in zip(others, earlier, strict=True)]",
        (f"{CONTINUED}TestWhatItCosts::test_old_and_new_noise_spend_the_raised_budget_together",),
    ),
    Mutant(
        "continued: noise that forgets other runs",
        "before = [accounting.compose([*a, *b]) for a, b in zip(others, earlier, strict=True)]",
        "before = [accounting.compose(b) for a, b in zip(others, earlier, strict=True)]",
        (f"{CONTINUED}TestWhatItCosts::test_a_ledger_file_counts_other_runs_between",),
    ),
    Mutant(
        "continued: a plan that does not count the rounds before",
        "return accounting.compose([*self.before, *self.released])",
        "return accounting.compose(\n"
        "            [*self.before, (self.mechanism.dp_event, self.num_releases)]\n"
        "        )",
        (f"{CONTINUED}TestWhatItCosts::test_old_and_new_noise_spend_the_raised_budget_together",),
    ),
    Mutant(
        "continued: only the last part is carried into a third",
        "return accounting.compose([*self.earlier, (self.mechanism.dp_event, self.num_releases)])",
        "return accounting.compose([(self.mechanism.dp_event, self.num_releases)])",
        (f"{CONTINUED}TestWhatItCosts::test_twice",),
    ),
    Mutant(
        "continued: earlier rounds in the ledger with the new noise",
        "entries(self.plan.at(number), number, self.groups[number], first.run)",
        "entries(self.plan, number, self.groups[number], first.run)",
        (f"{CONTINUED}TestWhatItCosts::test_each_round_is_charged_with_its_own_noise",),
    ),
    Mutant(
        "continued: the first new round in the ledger with the old noise",
        "if self.continues is None or round_number >= self.first_round:",
        "if self.continues is None or round_number > self.first_round:",
        (f"{CONTINUED}test_killed_with_a_ledger_file_no_round_is_charged_twice",),
    ),
    Mutant(
        "continued: the first new round starts before its charge is on the disk",
        "return self.continued is not None or not self.path.exists()",
        "return not self.path.exists()",
        (f"{CONTINUED}TestWhatItCosts::test_its_charge_is_on_the_disk_before_a_round_starts",),
    ),
    Mutant(
        "continued: private factors begin anew in silence",
        "if self.continued is not None and first.clients.private is not None:",
        "if False:",
        (f"{CONTINUED}TestRefusals::test_what_clients_kept_is_gone",),
    ),
    Mutant(
        "continued: a smaller delta",
        "if now.epsilon < was.epsilon or now.delta < was.delta:",
        "if now.epsilon < was.epsilon:",
        (f"{CONTINUED}TestRefusals::test_less_than_before",),
    ),
    Mutant(
        "continued: a smaller epsilon",
        "if now.epsilon < was.epsilon or now.delta < was.delta:",
        "if now.delta < was.delta:",
        (f"{CONTINUED}TestRefusals::test_less_than_before",),
    ),
    Mutant(
        "continued: a run that has rounds left under its old plan",
        "return self.ended and same and run.num_rounds > self.num_rounds",
        "return same and run.num_rounds > self.num_rounds",
        (f"{CONTINUED}TestRefusals::test_before_it_has_ended",),
    ),
    Mutant(
        "continued: the run's own charges in the file count twice",
        "others = tuple(entry for entry in ledger.entries if entry.run != besides)",
        "others = ledger.entries",
        (f"{CONTINUED}TestWhatItCosts::test_a_ledger_file_counts_other_runs_between",),
    ),
    Mutant(
        "continued: other runs since the first part are not looked for",
        "spent = functools.partial(ledger_file.spent, besides=past.run_name)",
        "spent = past.parts[-1].spent",
        (f"{CONTINUED}TestWhatItCosts::test_a_ledger_file_counts_other_runs_between",),
    ),
    Mutant(
        "continued: rounds of a checkpoint charged with the newest noise",
        "of_part = self.groups[part.first_round : min(end, rounds)]",
        "of_part = self.groups[:rounds] if part is self.plan else ()",
        (f"{CONTINUED}TestWhatItCosts::test_its_charge_is_on_the_disk_before_a_round_starts",),
    ),
)

_GATEWAY = (
    Mutant(
        "gateway: a step that is not charged",
        "if visit.step not in before:\n            client = self._charged(",
        "if visit.step in before:\n            client = self._charged(",
        (f"{GATEWAY}test_a_step_is_released_once",),
    ),
    Mutant(
        "gateway: a step again, from another approximation",
        "if before.get(visit.step, reserved) != reserved:",
        "if False:",
        (f"{GATEWAY}test_a_step_is_released_once",),
    ),
    Mutant(
        "gateway: a reply that is not kept before it is sent",
        "self.store.keep(digest, reserved, reply, private)",
        "pass",
        (f"{GATEWAY}test_a_step_is_released_once",),
    ),
    Mutant(
        "gateway: more replies than the caps allow",
        "if len(ledger.entries) >= self.caps.releases:",
        "if False:",
        (f"{GATEWAY}test_the_hospital_stops_where_its_caps_say",),
    ),
    Mutant(
        "gateway: less noise than the caps allow",
        "if not noise >= caps.noise_multiplier:",
        "if False:",
        (f"{GATEWAY}test_what_is_wrong_is_said_before_it_listens",),
    ),
    Mutant(
        "gateway: a study that was changed",
        '_bytes(path) if sha256 is None else _reviewed(path, sha256, "study")',
        "_bytes(path)",
        (f"{GATEWAY}test_a_study_that_was_changed_is_not_run",),
    ),
    Mutant(
        "gateway: an error's text is sent",
        "return messages.encode(Refused(code, wire.digest(message)))",
        "return traceback.format_exc().encode()",
        (f"{GATEWAY}test_an_error_shows_nothing",),
    ),
    Mutant(
        "gateway: shares of noise that were not agreed to",
        "if prepared.run.trusted is not None and not mine.caps.trusted_aggregator:",
        "if False:",
        (f"{HOSPITALS}test_shares_of_noise_leave_no_hospital_that_does_not_allow_it",),
    ),
    Mutant(
        "gateway: a sum with too little noise",
        "if sum(isinstance(reply, Released) for reply in replies.values()) < self._least:",
        "if False:",
        (f"{HOSPITALS}test_a_sum_with_too_little_noise_is_never_made",),
    ),
    Mutant(
        "gateway: a prior that nobody has reviewed",
        'held = _reviewed(path, sha256, "posterior")',
        "held = _bytes(path)",
        (f"{HOSPITALS}test_an_earlier_posterior_is_the_prior",),
    ),
)

MUTANTS = (
    *_NOISE,
    *_DISCRETE,
    *_CLIP,
    *_ROUNDING,
    *_KEYS,
    *_SAMPLER,
    *_ACCOUNTANT,
    *_CHARGING,
    *_PRIVATE_STATE,
    *_WHITE,
    *_AGGREGATOR,
    *_REFUSALS,
    *_UNITS,
    *_ROWS,
    *_SELECTION,
    *_ALONE,
    *_CONTINUED,
    *_GATEWAY,
)
