"""The report of a study, drawn from the files in its folder alone: no model, no torch.

| module      | what it holds                                                             |
|-------------|---------------------------------------------------------------------------|
| `folder`    | what a study has left in its folder so far                                |
| `pooling`   | log-perplexities and their weighted sums over seeds × windows             |
| `claims`    | C1–C6: thresholds, verdicts                                               |
| `curves`    | ratio curves and the one-sentence result                                  |
| `figures`   | the page's figures                                                        |
| `tables`    | the page's tables                                                         |
| `page`      | OUT/report.html                                                           |
| `picture`   | one static picture of the ratio curves                                    |
| `costs`     | what everything costs, from a study's benchmark                           |
| `diagnosis` | why models hold or fail: a page, and a section of the study's             |
| `predicted` | what theory predicts from measurements                                    |
| `published` | the paper's numbers                                                       |
| `palette`   | one colour, dash and marker per mechanism                                 |
| `wording`   | numbers, intervals and lists in words                                     |
"""

from farfield.report.claims import verdicts
from farfield.report.page import write
from farfield.report.picture import curves_picture

__all__ = ["curves_picture", "verdicts", "write"]
