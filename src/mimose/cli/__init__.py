"""The command `mimose`: reports, what-if questions, demo, doctor, benchmark. Nobody imports it."""
