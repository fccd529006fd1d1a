"""What if: a bounds file, and the batch under other schedules, caps, microbatches and splits.

Times of stages and messages (``times``) come out of a bounds file (``bounds_file``) or a profiler's
traces (``trace_file``), are carried over to other splits (``layer_model``) and given to the actions
of other schedules. Every case of a ``grid`` is solved as in a run (``answers``), beside the best
split without freezing (``partition``); ``fronts`` has the gains of frozen layers. ``report`` is
printed, ``page`` is HTML.
"""
