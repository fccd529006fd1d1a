"""What if: one bounds file, and the batch under other schedules, caps, microbatches and splits.

Times of stages and messages (``times``) come out of a bounds file (``bounds_file``), are carried
over to other splits (``layer_model``) and given to the actions of other schedules. Every case of a
``grid`` is solved as a run would solve it (``answers``), beside the best split without freezing
(``partition``); ``fronts`` asks what frozen layers bring. ``report`` is what is printed.
"""
