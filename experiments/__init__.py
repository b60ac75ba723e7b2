"""The paper's figures and tables, and ours: the runs they need, and what came out.

python -m experiments list      every figure and table: which runs exist, which are missing, what they cost
python -m experiments train     train and measure what is missing
python -m experiments build     tables and figures from the rows in experiments/results
python -m experiments merge     take up rows that another machine has written
"""  # noqa: E501
