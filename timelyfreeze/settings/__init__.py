"""What a user chooses: phases of a run, and the settings of freezing."""
