"""Definitions of the columns of tables: tooltips and glossary of a page, docs/glossary.md."""

import re

COLUMNS = {
    "accuracy": "share of test images whose class is predicted; a tie is wrong",
    "mAP": "mean over queries of the average precision of their rankings",
    "rank 1": "share of queries whose most similar gallery image is of the same identity",
    "EER": "error rate at the threshold where as many wrong pairs are accepted as right ones "
    "rejected; smaller is better",
    "class margin": "smallest angle between two prototypes; larger is better",
    "sample margin": "cosine to the prototype of the true class minus the nearest wrong one, mean "
    "over the test images; negative for a mistake",
    "softmax bias": "log-sum-exp of the scores of the other classes minus the largest of them, "
    "between 0 and log(C − 1); mean over the test images",
    "time": "seconds of training, without evaluation",
    "error": "share of test images whose class is not predicted; smaller is better",
    "training error": "share of training images whose class is not predicted",
    "group": "runs that differ only in their seed",
    "seeds": "number of finished runs of the group",
    "n": "number of seeds that the number is a mean of",
    "seed": "seed of initial weights, data order and augmentation",
    "state": "why the run is not in the means",
    "reason": "what the record of the run says about it",
    "folder": "folder of the run",
    "finding": "what the doctor calls it; docs/doctor.md explains each",
    "severity": "a warning is wrong, a note may be intended",
    "first seen": "look of the doctor that found it first",
    "measured": "what was measured, and why it matters",
    "what to change": "the cure that the doctor recommends",
    "class": "class as the data name it",
    "and class": "the other class of the pair",
    "angle": "angle between the prototypes of both classes",
    "first as second": "test images of the first class that are predicted as the second",
    "second as first": "test images of the second class that are predicted as the first",
    "% of both": "share of the test images of both classes that are confused with each other",
    "claim": "what the paper claims, as the recipe states it",
    "verdict": "whether our runs support the claim",
    "what was found": "our numbers for the claim",
    "row": "row of the table of the paper",
    "column": "column of the table of the paper",
    "paper": "number that the paper prints",
    "ours": "mean ± standard deviation of our finished seeds",
    "difference": "ours minus the paper's",
    "standard errors": "the difference in standard errors of both, or of ours (†)",
    "missing": "seeds without a number",
    "number": "what is measured",
    "95 % interval": "bootstrap over identities",
    "threshold": "smallest similarity that is accepted; chosen for a FAR on held-out identities",
    "FAR": "share of the pairs of two identities that are accepted",
    "TAR": "share of the pairs of one identity that are accepted",
    "FPIR": "share of the searches of unknown identities that are accepted",
    "TPIR": "share of the searches of known identities that are accepted and right",
    "identity": "individual, as the data name it",
    "queries": "number of its queries",
    "rank-1": "share of its queries whose most similar item is of the same identity",
    "most often taken for": "identity that most of its wrong first items are of, and how many",
    "for": "rate of false acceptances that the threshold is chosen for",
    "interval": "95 % interval of the number before it, over identities",
    "interval of TAR": "95 % interval over identities, at the threshold of each resample",
    "interval of TPIR": "95 % interval over identities, at the threshold of each resample",
    "same pairs": "pairs of two of its images",
    "rejected": "share of the same pairs below the threshold",
    "different pairs": "pairs of one of its images and one of another identity",
    "known searches": "searches of its images in a gallery that has the identity",
    "missed": "share of the known searches that are rejected or find another identity",
    "unknown searches": "searches of its images in a gallery without the identity",
    "accepted": "share of the different pairs, or of the unknown searches, that are accepted",
    "setting": "scale, margin and learning rate that were tried",
    "measure": "what is measured",
    "optimum": "best possible value for this number of classes and dimensions",
    "% of optimum": "the value as a share of its optimum",
    "note": "remark on it",
    "examples": "number of its examples",
    "mean margin": "mean sample margin of its examples",
    "smallest margin": "smallest sample margin of its examples",
    "degrees": "angle between both prototypes",
}


def definition(column: str) -> str:
    """Return the definition of a column; empty if it needs none.

    Example:
        >>> definition("class margin °")
        'smallest angle between two prototypes; larger is better'
        >>> definition("accuracy is")
        'whether the difference from the first group is clear'
    """
    known = COLUMNS.get(column) or COLUMNS.get(re.sub(r" [%°s]$", "", column), "")
    if not known and column.endswith(" is"):
        return "whether the difference from the first group is clear"
    return known
