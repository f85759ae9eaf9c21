"""Compress a small model by a DeepSpeed JSON: train, shrink, clean, write, read back, with a table of what it cost.

python scripts/compress.py --config ds.json --out runs/small.safetensors            (--task digits, --distill; --help)
"""

if __name__ == "__main__":
    from study.compress import main

    main()
