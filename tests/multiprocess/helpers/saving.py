"""Settings of runs that are saved and resumed."""

# Every checkpoint stays, and the last one has more than weights.
SAVED = {
    "checkpoint__enable": None,
    "checkpoint__keep_latest_k": 0,
    "checkpoint__no_last_save_model_only": None,
}


def resumed_from(checkpoint):
    """Return what makes a run go on from a checkpoint that it leaves as it is."""
    return {
        "checkpoint__initial_load_path": checkpoint,
        "checkpoint__no_initial_load_model_only": None,
        "checkpoint__load_only": None,
    }
