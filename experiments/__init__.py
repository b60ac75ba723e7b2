"""The paper's figures and tables, and ours: the runs that they need, and their results.

python -m experiments list      figures and tables, their finished and missing runs, and the cost
python -m experiments train     train and measure the missing runs
python -m experiments build     write tables and figures from the rows in experiments/results
python -m experiments merge     add rows that another machine has written
"""
