"""The objective of tasks that `finetune` learns: the labels of rows."""
