"""The benchmark: the paper's tables and figures on the machine at hand, against peers.

    mimose bench --quick

`workloads` are the tasks, `texts` and `images` the batches that they draw, `contestants` who trains
them, `survey` what is found out about a task before anything is timed, `harness` one timed run,
`schedule` all of them in turns, `records` the file that keeps them; `analysis`, `tables` and
`figures` read it.
"""
