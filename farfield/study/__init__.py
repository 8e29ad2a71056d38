"""Studies: recipes, the grid of runs, and where they run.

| module    | what it holds                                                             |
|-----------|---------------------------------------------------------------------------|
| `recipe`  | what a study trains and measures, as validated TOML; `recipes/*.toml`     |
| `run`     | one run's folder and `run.json`; the grid of runs and their order         |
| `job`     | one run from start to end, a process of its own: train, save, evaluate    |
| `launch`  | a whole study: what is due, who carries it, rows gathered, page written   |
| `single`  | one run in this process                                                   |
| `folder`  | whose folder it is; the environment; the rows of all runs together        |
| `display` | what a person sees meanwhile                                              |
| `files`   | JSON files that are whole or not there                                    |
"""
