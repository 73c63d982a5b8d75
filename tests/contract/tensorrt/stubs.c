/* Stands in for libnvinfer, libnvinfer_plugin and libnvonnxparser, so that the real Python bindings of
 * TensorRT load without the 2.7 GB of the libraries, and without a GPU. Nothing can be built or run: every
 * factory gives a null pointer. What can be checked is what the bindings offer, and how they call back. */
#include <stddef.h>
#include <stdint.h>

#define NOTHING(name) void *name(void) { return NULL; }

NOTHING(createInferRefitter_INTERNAL)
NOTHING(createInferRuntime_INTERNAL)
NOTHING(createNvOnnxParserRefitter_INTERNAL)
NOTHING(createNvOnnxParser_INTERNAL)
NOTHING(getBuilderPluginRegistry)
NOTHING(getPluginRegistry)

int32_t getNvOnnxParserVersion(void) { return 0; }
int initLibNvInferPlugins(void *logger, const char *space) { (void)logger; (void)space; return 0; }

/* What the real library does first: it says something to the logger, by the logger's own table. Entries 0 and 1
 * are those of its interface, 2 and 3 destructors. */
enum { LOG = 4 };
typedef void (*log_function)(void *self, int32_t severity, const char *text);

void *createInferBuilder_INTERNAL(void *logger, int32_t version) {
    (void)version;
    (*(log_function **)logger)[LOG](logger, 2, "said by the library");
    return NULL;
}
