"""`python -m mimose.bench`: the same as `mimose bench`."""

from mimose.bench.extras import need

if __name__ == "__main__":
    need("typer")
    from mimose.bench.command import app

    app()
