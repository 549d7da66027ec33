"""The backward in the simulator: how it is told what it walks, and mistakes that must be found."""

from __future__ import annotations

from simulated import Mutation, Simulated

MUTATIONS = (
    Mutation(
        "finished_without_stage",
        (
            ("!is_last_group, FINISHED + at.index,", "!is_last_group, FINISHED,"),
            ("== 1 || is_last_group, FINISHED + at.index,", "== 1 || is_last_group, FINISHED,"),
        ),
    ),
    Mutation(
        "asked_for_before_all_have_finished", (("== 1 || is_last_group, FINISHED + at.index,", "== 1, FINISHED,"),)
    ),
    Mutation("asked_for_before_it_has_finished", (("wgmma_wait(WITH_DS); ", "wgmma_wait(WITH_DS + 1); "),)),
    Mutation("asked_for_into_the_stage_at_work", (("base, index_before(at.index), &w,", "base, at.index, &w,"),)),
    Mutation("a_stage_too_many_at_the_start", (("u < STAGES - 1; u++", "u < STAGES; u++"),)),
    Mutation("more_asked_for_than_there_is", (("load_tile(next.head < w.heads && arrived,", "load_tile(arrived,"),)),
    Mutation("statistics_not_announced", (("WALK_BYTES + (statistics ? STATISTICS_BYTES : 0)", "WALK_BYTES"),)),
    Mutation("statistics_of_another_row", (("2 * row, w->batch * heads + head", "row, w->batch * heads + head"),)),
    Mutation("arrivals_of_one_warpgroup", (("i == 0 ? WARPGROUPS : LOADERS", "i == 0 ? 1 : LOADERS"),)),
    Mutation("the_other_way_along_a_head", (("(w->start + FORWARDS * at.tile)", "(w->start - FORWARDS * at.tile)"),)),
    Mutation("own_rows_of_the_first_warpgroup", (("int row = w->own_row + group * ROWS;", "int row = w->own_row;"),)),
    Mutation("waits_in_vain_for_nothing", (("steps > 0 ? 0 : 1, p.zero", "0, p.zero"),)),
    Mutation("stored_before_the_end", (("  wgmma_wait(0);\n", ""),)),
    Mutation("loads_after_a_time_out", (("next.head < w.heads && arrived,", "next.head < w.heads,"),), time_outs=True),
    Mutation("rows_not_poisoned", (("poison = arrived ? 0.f : NAN;", "poison = 0.f;"),), time_outs=True),
)

BACKWARD = Simulated(
    name="backward",
    scheduled=(("const walk w = walk_of(&p);", "const walk w = scheduled_walk<walk>();"),),
    tiles_and_steps=((3, 5), (1, 12)),
    mutations=MUTATIONS,
)
