"""From a freeze ratio to the tensors of a stage that are frozen in one microbatch."""

from timelyfreeze.masks.selection import (
    FreezeUnits,
    ParameterTable,
    build_parameter_table,
    build_units,
    draw_uniform,
    draw_whether,
    fit_to_ratio,
    fit_whole_stage,
    mask_rng,
)
