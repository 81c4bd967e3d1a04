/*
 * One row per shape and engine: on the terminal, as CSV and as JSON.
 */
#define _POSIX_C_SOURCE 200112L

#include "bench.h"

#include <string.h>

static const char csv_header[] =
    "name,engine,dtype,layout,mask,causal,threads,B,Hq,Hkv,Tq,Tk,D,Dv,ns_min,"
    "ns_median,ns_spread,iterations,gflops_full,gflops_visible,peak_gflops,"
    "peak_share,gbytes_s,read_gbytes_s,scratch_bytes,error_max,error_rms,"
    "error_rows,direction\n";

static int json_rows;

/* Quotes and backslashes do not occur in what the library reports; control
 * characters would break the file, so they go. */
static void json_text(FILE *file, const char *text)
{
    for (; *text; text++)
        if ((unsigned char)*text >= ' ' && *text != '"' && *text != '\\')
            fputc(*text, file);
}

static void json_open(FILE *file, const struct bench_peaks *peaks)
{
    fprintf(file, "{\n\"library\": \"");
    json_text(file, attn_build_info());
    fprintf(file, "\",\n\"blas\": \"");
    json_text(file, attn_blas_info());
    fprintf(file,
            "\",\n\"threads\": %d,\n\"fma_gflops\": {\"f32\": %.4g, \"f64\": "
            "%.4g},\n\"gemm_gflops\": {\"f32\": %.4g, \"f64\": %.4g},\n"
            "\"read_gbytes_s\": {\"one\": %.4g, \"all\": %.4g},\n\"rows\": [",
            peaks->threads, peaks->fma[ATTN_F32], peaks->fma[ATTN_F64],
            peaks->gemm[ATTN_F32], peaks->gemm[ATTN_F64], peaks->read_one,
            peaks->read_all);
    json_rows = 0;
}

void bench_table_open(const struct bench_options *options,
                      const struct bench_peaks *peaks)
{
    if (options->csv)
        fputs(csv_header, options->csv);
    if (options->json)
        json_open(options->json, peaks);
}

void bench_table_close(const struct bench_options *options)
{
    if (options->json)
        fprintf(options->json, "\n]\n}\n");
}

/* The mask, or the feature. */
static const char *hides(const struct bench_shape *s)
{
    return s->feature ? bench_feature_name(s->feature)
                      : bench_mask_name(s->mask);
}

/* The CSV line is also the source of the JSON object: one list of values. */
static void csv_line(char *line, size_t size, const struct bench_row *r)
{
    const struct bench_shape *s = &r->shape;
    double full = r->flops_full / r->time.min;
    snprintf(
        line, size,
        "%s,%s,%s,%s,%s,%d,%d,%lld,%lld,%lld,%lld,%lld,%lld,%lld,%.1f,%.1f,"
        "%.1f,%lld,%.3f,%.3f,%.2f,%.4f,%.3f,%.3f,%zu,%.3e,%.3e,%lld,%s",
        s->name, r->engine, bench_dtype_name(s->dtype),
        bench_layout_name(s->layout), hides(s), s->causal, r->threads,
        (long long)s->batch, (long long)s->heads, (long long)s->kv_heads,
        (long long)s->q_len, (long long)s->kv_len, (long long)s->width,
        (long long)s->v_width, r->time.min, r->time.median, r->time.spread,
        (long long)r->time.iterations, full, r->flops_visible / r->time.min,
        r->peak_gflops, r->flops_visible / r->time.min / r->peak_gflops,
        r->bytes / r->time.min, r->peak_gbytes, r->work_bytes, r->error.max,
        r->error.rms, (long long)r->error.rows, bench_direction_name(s));
}

/* Walks header and line side by side. The first five values are text, and the
 * last. */
static void json_row(FILE *file, const char *line)
{
    const char *key = csv_header;

    fprintf(file, json_rows++ ? ",\n {" : "\n {");
    for (int n = 0; *line; n++) {
        size_t key_length = strcspn(key, ",\n");
        size_t length = strcspn(line, ",");
        const char *quote = n < 5 || !line[length] ? "\"" : "";
        fprintf(file, "%s\"%.*s\": %s%.*s%s", n ? ", " : "", (int)key_length,
                key, quote, (int)length, line, quote);
        key += key_length + 1;
        line += length + (line[length] == ',');
    }
    fputc('}', file);
}

void bench_table_header(void)
{
    printf("\n%-16s %-3s %3s %3s %3s %5s %5s %3s %-3s %-7s %-9s %-11s %10s %6s "
           "%7s "
           "%7s %5s %6s %5s %8s %8s\n",
           "shape", "dir", "B", "Hq", "Hkv", "Tq", "Tk", "D", "typ", "layout",
           "mask", "engine", "min us", "+med%", "GF full", "GF vis", "peak%",
           "GB/s", "read%", "scratch", "error");
}

static const char *mask_text(const struct bench_shape *s)
{
    static const char *const causal[] = {"causal", "c+keep", "c+add",
                                         "c+padding"};
    return s->causal && !s->feature ? causal[s->mask] : hides(s);
}

void bench_table_row(const struct bench_row *r,
                     const struct bench_options *options)
{
    const struct bench_shape *s = &r->shape;
    double visible = r->flops_visible / r->time.min;
    double gbytes = r->bytes / r->time.min;
    char line[1024];

    printf(
        "%-16s %-3s %3lld %3lld %3lld %5lld %5lld %3lld %-3s %-7s %-9s %-11s "
        "%10.1f %6.1f %7.1f %7.1f %5.1f %6.1f %5.1f %7zuK %8.1e\n",
        s->name, s->backward ? "bwd" : "fwd", (long long)s->batch,
        (long long)s->heads, (long long)s->kv_heads, (long long)s->q_len,
        (long long)s->kv_len, (long long)s->width, bench_dtype_name(s->dtype),
        bench_layout_name(s->layout), mask_text(s), r->engine,
        r->time.min / 1e3, 100 * (r->time.median / r->time.min - 1),
        r->flops_full / r->time.min, visible, 100 * visible / r->peak_gflops,
        gbytes, 100 * gbytes / r->peak_gbytes, (r->work_bytes + 1023) / 1024,
        r->error.max);
    fflush(stdout);
    csv_line(line, sizeof(line), r);
    if (options->csv) {
        fprintf(options->csv, "%s\n", line);
        fflush(options->csv);
    }
    if (options->json)
        json_row(options->json, line);
}

/* ------------------------------------------------------------ One shape -- */

struct timing_limits bench_limits(const struct bench_options *options,
                                  int threads)
{
    struct timing_limits limits = options->limits;
    if (threads > 1)
        limits.cpu_time = 0;
    return limits;
}

static void fill_row(struct bench_row *row, const struct bench_problem *p,
                     double fma, const struct bench_peaks *peaks)
{
    const struct bench_shape *s = &p->shape;
    double widths = (double)(s->width + s->v_width);
    double item = p->k.dtype == ATTN_BF16 ? sizeof(uint16_t)
                                          : (double)bench_item_bytes(s->dtype);
    int alone = row->threads == 1;

    row->shape = *s;
    row->flops_full = bench_full_flops(s);
    row->flops_visible = bench_visible_pairs(p) * bench_pair_flops(s);
    row->bytes =
        (double)(s->batch * s->kv_heads) * (double)s->kv_len * widths * item;
    row->peak_gflops = bench_best_fma(s->dtype, fma) * row->threads;
    row->peak_gbytes = alone ? peaks->read_one : peaks->read_all;
}

/* Engines that can do the shape and do it right. */
static int verify_engines(struct bench_problem *p, int compare,
                          const struct bench_engine **engines,
                          struct bench_error *errors, int *wrong)
{
    int count = 0;
    for (int n = 0; n < (compare ? bench_num_engines : 1); n++) {
        if (!bench_engines[n].can(&p->shape))
            continue;
        if (bench_verify(&bench_engines[n], p, &errors[count])) {
            printf("%-16s %s %s: WRONG, error %.1e is beyond %.1e; not timed\n",
                   p->shape.name, bench_engines[n].name,
                   bench_direction_name(&p->shape), errors[count].max,
                   bench_error_bound(&p->shape));
            *wrong += 1;
            continue;
        }
        engines[count++] = &bench_engines[n];
    }
    return count;
}

int bench_run_shape(const struct bench_shape *shape,
                    const struct bench_peaks *peaks,
                    const struct bench_options *options)
{
    struct bench_problem p;
    const struct bench_engine *engines[TIMING_MAX_TASKS];
    struct timing_task tasks[TIMING_MAX_TASKS];
    struct timing times[TIMING_MAX_TASKS];
    struct bench_error errors[TIMING_MAX_TASKS];
    struct timing_limits limits = bench_limits(options, options->threads);
    attn_status status;
    double flops;
    int count, wrong = 0;

    status = bench_problem_create(&p, shape, options->threads);
    if (status == ATTN_ERR_UNSUPPORTED)
        printf("%-16s refused: %s\n", shape->name, attn_last_error());
    if (status)
        return status != ATTN_ERR_UNSUPPORTED;
    count = verify_engines(&p, options->compare, engines, errors, &wrong);
    for (int n = 0; n < count; n++)
        tasks[n] = (struct timing_task){engines[n]->run, &p};
    /* The peak, beside them: its share is of the same moments. */
    tasks[count] = bench_probe_fma(shape->dtype, &flops);
    if (count > 0)
        timing_compare(tasks, count + 1, &limits, times);
    for (int n = 0; n < count; n++) {
        int ours = engines[n] == &bench_engines[ENGINE_LIBATTN];
        int loop = engines[n] == &bench_engines[ENGINE_ROW_LOOP];
        struct bench_row row = {.engine = engines[n]->name,
                                .threads = loop ? 1 : options->threads,
                                .time = times[n],
                                .work_bytes = ours ? p.work_bytes : 0,
                                .error = errors[n]};
        fill_row(&row, &p, flops / times[count].min, peaks);
        bench_table_row(&row, options);
    }
    bench_problem_destroy(&p);
    return wrong;
}
