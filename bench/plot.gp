# Rate against length from the CSV of attn_bench:
#
#   attn_bench --shapes --csv rows.csv
#   gnuplot -e "csv='rows.csv'; out='rate.svg'" bench/plot.gp
#
# One line per (d, causal), self-attention in float32 without other masks, and
# the FMA peak that was timed beside each row. direction='backward' draws the
# gradients, of attn_bench --backward.
if (!exists("direction")) direction = "forward"
if (!exists("csv")) csv = "rows.csv"
if (!exists("out")) out = "rate.svg"

set terminal svg size 800,500 dynamic background rgb "white"
set output out
set datafile separator ","
set key bottom right
set logscale x 2
set grid
set xlabel "T (queries = keys)"
set ylabel "GFLOP/s, visible pairs counted"
set yrange [0:*]

# Columns by name would need quotes in a filter, so: 2 engine, 3 dtype, 5 mask,
# 6 causal, 7 threads, 8 B, 11 Tq, 12 Tk, 13 D, 20 visible rate, 21 peak,
# 29 direction.
keep(d, c) = strcol(2) eq "libattn" && strcol(3) eq "f32" \
    && strcol(29) eq direction && strcol(5) eq "none" \
    && column(6) == c && column(8) == 1 && column(11) == column(12) \
    && column(13) == d
rate(d, c) = keep(d, c) ? column(20) : NaN
peak(d) = keep(d, 0) ? column(21) : NaN
set datafile missing NaN

plot csv using 11:(rate(64, 0)) skip 1 smooth unique with linespoints \
         title "d=64", \
     csv using 11:(rate(64, 1)) skip 1 smooth unique with linespoints \
         title "d=64, causal", \
     csv using 11:(rate(128, 0)) skip 1 smooth unique with linespoints \
         title "d=128", \
     csv using 11:(rate(128, 1)) skip 1 smooth unique with linespoints \
         title "d=128, causal", \
     csv using 11:(peak(64)) skip 1 smooth unique with lines dashtype 2 \
         title "FMA peak"
