"""Loop trees: the search for the fastest one whose predicted peak fits, and the models of memory and time that it asks."""
