"""What if: one bounds file, and the batch under other schedules, caps, microbatches and splits.

Times of stages (``times``) come out of a bounds file (``bounds_file``, ``notes``), are carried over
to other splits (``layer_model``, ``splits``) and given to the actions of other schedules
(``orders``), with the messages that these send (``links``). Every case of a grid (``grid``) is
solved as a run would solve it (``answer``, ``schedule_cases``), beside the best split without
freezing (``best_unfrozen``). ``command`` is ``python -m timelyfreeze plan``, ``report`` what it prints.
"""
