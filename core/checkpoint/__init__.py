"""Snapshot: model, optimizer, loader and random generators in one file that survives any kill.

* `snapshot`: `Snapshot` itself, what a training script calls.
* `epoch_loop`, `body_record`: the loop over epochs, and what a snapshot keeps of the body that is running.
* `content`: what a snapshot holds, from the ranks to the file and back.
* `parts`: what a snapshot saves, and whether a saved state fits what the script has now.
* `generators`: python's, numpy's and torch's global generators of the training process.
* `ranks`: the processes that train together: what they tell each other, and when.
* `signals`: SIGTERM and the like, answered between two batches.
* `files`: writing a file whole, keeping the ones before, finding the newest sound one.
* `private`: private parts of torch and Python.
"""
