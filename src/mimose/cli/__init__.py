"""The command `mimose`: reports, what-if forecasts, demo, doctor, benchmark."""
