"""How far past its training length a model holds: the length ladder, its rows and their intervals.

| module       | what it holds                                                              |
|--------------|----------------------------------------------------------------------------|
| `losses`     | −log p of every target, from any Hugging Face causal model, in chunks      |
| `plan`       | which lengths fit, which tokens each protocol scores, what that costs      |
| `protocols`  | windows, fixed targets, clipped context: which forward gives which loss    |
| `ladder`     | all of them over one model and one stream of tokens, as rows               |
| `scaled`     | the same model with its rotations scaled to each length, as more rows      |
| `pretrained` | the same for a model folder on disk                                        |
| `intervals`  | bootstrap over windows and seeds (numpy alone)                             |
| `rows`       | the result rows, checked on reading and writing (no torch, no model)       |
| `whole`      | files that are whole or as they were (the standard library alone)          |
"""
