"""`midepoch demo`: kill a real training job in mid-epoch, and show that it goes on exactly.

`images` writes the data, `train` is the script that torchrun runs, `orchestrate` starts and kills it, `compare` reads
what each process wrote down about each batch, `report` shows it. Everything here needs the extra `midepoch[demo]`.
"""
