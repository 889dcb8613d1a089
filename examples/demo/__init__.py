"""``make demo``: kill a real training job in mid-epoch, and show that it resumes exactly.

`images` writes the data, `train` is the script that torchrun runs, `orchestrate` starts and kills it, `compare` reads
each process's log of batches, and `report` shows the result. Everything here needs the extra `midepoch[demo]`.
"""
