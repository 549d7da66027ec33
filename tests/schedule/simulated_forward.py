"""The forward in the simulator: how it is told its query tiles, and mistakes that must be found."""

from __future__ import annotations

from simulated import Mutation, Simulated

MUTATIONS = (
    Mutation("load_skipped_never_loads", (("go && u - l->loads_v >= now->key_tiles, l,", "0 && go, l,"),)),
    Mutation("no_zeros_complete_the_last_pair", (("zeros = next->key_tiles == 0 && !l->loads_v;", "zeros = 0;"),)),
    Mutation(
        "finished_without_stage",
        (
            ("!is_last_group, FINISHED + pair.index,", "!is_last_group, FINISHED,"),
            ("== 1 || is_last_group, FINISHED + pair.index,", "== 1 || is_last_group, FINISHED,"),
        ),
    ),
    Mutation(
        "scored_without_stage",
        (
            ("(!is_last_group, SCORED + pair.index,", "(!is_last_group, SCORED,"),
            ("(is_last_group, SCORED + pair.index,", "(is_last_group, SCORED,"),
        ),
    ),
    Mutation(
        "no_arrival_for_the_missing_v",
        (("mbarrier_arrive_expect_tx(load.active && load.loads_v, pairs_full, 0);", ""),),
    ),
    Mutation(
        "asked_for_before_the_turn",
        (
            ("if (!EARLY_K) LOAD(1, t - 1);", ""),
            (
                "take_turn(TURN + group); } while (0)",
                "LOAD(!EARLY_K, t - 1); take_turn(TURN + group); } while (0)",
            ),
        ),
    ),
    Mutation("warps_of_a_lone_one_do_not_meet", (("if (WARPGROUPS == 1 || EARLY_K)", "if (EARLY_K)"),)),
    Mutation("k_asked_for_twice", (("LOAD(load.loads_v, t - 1);", "LOAD(1, t - 1);"),)),
    Mutation("early_k_never_asked_for", (("LOAD(!load.loads_v, t);", "LOAD(0, t);"),)),
    Mutation(
        "k_asked_for_before_all_have_scores", (("(is_last_group, SCORED + pair.index,", "(0, SCORED + pair.index,"),)
    ),
    Mutation("own_pairs_past_the_end", (("(t < now.key_tiles - STAGES)", "(t < now.key_tiles)"),)),
    Mutation(
        "own_pairs_of_the_next_head", (("now->key_head,\n            now->batch", "now->key_head + 1, now->batch"),)
    ),
    Mutation("loads_after_a_time_out", (("load_pair((go) && arrived,", "load_pair((go),"),), time_outs=True),
    Mutation(
        "loads_own_after_a_time_out", (("load_own_pair((go) && arrived,", "load_own_pair((go),"),), time_outs=True
    ),
    Mutation("rows_not_poisoned", (("poison = arrived ? 0.f : NAN;", "poison = 0.f;"),), time_outs=True),
)

FORWARD = Simulated(
    name="forward",
    scheduled=(
        ("query_tile now = nth_query_tile(&p, nth);", "query_tile now = scheduled_tile<query_tile>(nth);"),
        (
            "const query_tile next = nth_query_tile(&p, ++nth);",
            "const query_tile next = scheduled_tile<query_tile>(++nth);",
        ),
    ),
    tiles_and_steps=((4, 4), (2, 9)),
    mutations=MUTATIONS,
)
